"""LoRA: exact at the start, trains adapters and classifier alone, and merges into a stock model."""

import copy

import pytest
import torch
from peft import PeftModel
from torch import nn

from razorctl import Recipe, models, restore, sparsify
from razorctl.errors import UsageError
from razorctl.job import Job
from razorctl.planning.job_trace import trace
from razorctl.surgery import adapters
from tests.models import SMALL
from tests.surgery.test_methods import step

every_model = pytest.mark.parametrize("kind", SMALL)


def build(kind: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model, batch = SMALL[kind]
    return model().train(), batch()


@every_model
def test_only_adapters_and_the_classifier_are_trained(kind):
    net, x = build(kind)
    want = step(net, x)[0]
    names = sparsify(net, Recipe("lora"))
    classifier = [n for n, m in net.named_modules() if type(m) is nn.Linear and "lora" not in n][-1]
    assert names
    assert classifier not in names
    assert torch.equal(step(net, x)[0], want)
    for name, p in net.named_parameters():
        adapted = "lora_" in name or name.startswith(f"{classifier}.")
        assert p.requires_grad == adapted == (p.grad is not None), name
    ranks = {len(p) for n, p in net.named_parameters() if "lora_A" in n}
    assert ranks == {8}


@every_model
def test_restore_merges_into_the_stock_model(kind):
    net, x = build(kind)
    stock = copy.deepcopy(net)
    modules = [(name, type(module)) for name, module in net.named_modules()]
    net.get_parameter(next(iter(dict(net.named_parameters())))).requires_grad_(False)
    sparsify(net, Recipe("lora"))
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.1)
    for _ in range(2):
        step(net, x)
        optimizer.step()
    want = step(copy.deepcopy(net), x)[0]
    restore(net)
    assert [(name, type(module)) for name, module in net.named_modules()] == modules
    assert list(net.state_dict()) == list(stock.state_dict())
    assert vars(net).keys() == vars(stock).keys()
    assert [p.requires_grad for p in net.parameters()] == [False] + [True] * (
        len(list(net.parameters())) - 1
    )
    stock.load_state_dict(net.state_dict())
    torch.testing.assert_close(step(stock, x)[0], want, rtol=1e-4, atol=1e-5)


@every_model
def test_saved_adapters_load_by_peft_alone(kind, tmp_path):
    net, x = build(kind)
    pretrained = copy.deepcopy(net)
    sparsify(net, Recipe("lora"))
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.1)
    for _ in range(2):
        step(net, x)
        optimizer.step()
    adapters.save(net, tmp_path)
    loaded = PeftModel.from_pretrained(pretrained, str(tmp_path))
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(x), net.eval()(x))
    step(net.train(), x)  # and training can go on


@pytest.mark.parametrize("attention", ["stored", "flash"])
def test_with_another_attention(attention):
    net, x = build("vit")
    want = step(net, x)[0]
    sparsify(net, Recipe("lora", attention=attention))
    torch.testing.assert_close(step(net, x)[0], want)
    restore(net)
    torch.testing.assert_close(step(net, x)[0], want)


def test_the_peak_is_traced_without_the_gradients_and_states_of_frozen_weights():
    job = Job("vit-micro", "digits", batch_size=8, precision="fp32", optimizer="adamw")
    job = job.resolved(models.find("vit-micro").defaults, 1437)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    full, lora = trace(job, Recipe("full"), 10), trace(job, Recipe("lora"), 10)
    assert torch.equal(torch.get_rng_state(), state)
    assert lora.weights > full.weights
    assert lora.optimizer < 0.2 * full.optimizer
    assert lora.peak < full.peak
    assert trace(job, Recipe("full"), 10) == full  # what was adapted is as it was


def test_what_cannot_be_adapted_is_refused_and_left_alone():
    with pytest.raises(UsageError, match="no linear layer before its classifier"):
        sparsify(nn.Linear(3, 4), Recipe("lora"))
    net, _ = build("vit")
    sparsify(net, Recipe("lora"))
    with pytest.raises(UsageError, match="sparsified already"):
        sparsify(net, Recipe("lora"))
    del net.razor_trainable
    with pytest.raises(UsageError, match="has adapters already"):
        sparsify(net, Recipe("lora"))
    with pytest.raises(UsageError, match="set joint_budget to 1"):
        Recipe("lora", joint_budget=0.5)
