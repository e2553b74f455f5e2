"""`razor` on models that nobody fitted it to: some of those of scripts/bench/foreign.py."""

import architectures
import foreign
import passes
import pytest
import timm
from torch import nn

from razorctl import Recipe, restore, sparsify
from razorctl.surgery.byte_budget import sparsify_within

# A model -> the share of full's bytes that plain `sparsify` keeps at most at ratio 0.9.
SHARES = {
    "torch TransformerEncoderLayer": 0.20,
    "torch TransformerDecoderLayer": 0.18,
    "torch MultiheadAttention": 0.12,
    "torch Conv1d": 0.15,
    "transformers bert": 0.14,
    "transformers gpt2": 0.07,
    "transformers llama": 0.10,
    "transformers t5": 0.07,
    "transformers bart": 0.15,
    "transformers opt": 0.20,
    "transformers mixtral": 0.06,
    "transformers qwen2_moe": 0.01,
    "transformers bloom": 0.15,
    "transformers falcon": 0.13,
    "transformers deberta-v2": 0.15,
    "transformers albert": 0.09,
    "transformers dinov2": 0.15,
    "transformers swin": 0.16,
    "transformers convnext": 0.11,
    "transformers segformer": 0.16,
    "transformers clip": 0.11,
    "transformers gpt_oss": 0.05,
    "transformers modernbert": 0.11,
    "transformers whisper": 0.16,
    "peft LoraConfig": 0.08,
    "peft VeraConfig": 0.04,
    "peft BOFTConfig": 0.05,
    "peft LNTuningConfig": 0.09,
    "timm vision_transformer": 0.13,
    "timm convnext": 0.10,
    "timm resnet": 0.13,
    "timm efficientnet": 0.08,
}
# Of these plain `sparsify` knows no layer, or keeps too much.
WITHIN = (
    "torch LSTM",
    "torch Linear, Softplus",
    "transformers mamba",
    "transformers segformer",  # its convolutions stay close
    "transformers vit_mae",  # its embeddings run again
    "transformers switch_transformers",  # its router converts itself
)


def made(model: str) -> tuple[nn.Module, object]:
    library, name = model.split(" ", 1)
    return foreign.LIBRARIES[library][0](name)


@pytest.mark.parametrize("model", SHARES)
def test_forward_gradients_bytes_and_restore(model):
    net, inputs = made(model)
    want, types = passes.run(net, inputs), [type(module) for module in net.modules()]
    sparsify(net, Recipe(ratio=foreign.RATIO))
    got = passes.run(net, inputs)
    assert not foreign.faults(got, want, foreign.COSINES[foreign.RATIO])
    assert got.kept <= SHARES[model] * want.kept
    restore(net)
    assert [type(module) for module in net.modules()] == types


@pytest.mark.parametrize("model", WITHIN)
def test_a_tenth_of_any_model(model, monkeypatch):
    monkeypatch.setattr(foreign, "TOKENS", 16)  # each of which is a step of mamba's scan
    net, inputs = made(model)
    want = passes.run(net, inputs)
    sparsify_within(net, Recipe(ratio=foreign.RATIO), inputs)
    got = passes.run(net, inputs)
    assert not foreign.faults(got, want, foreign.COSINES[foreign.RATIO])
    assert got.kept <= (1 - foreign.RATIO) * want.kept


# Cheap architectures of timm; the bench has one of each of its files.
MODULES = [
    "byobnet",
    "edgenext",
    "mambaout",
    "maxxvit",
    "mobilenetv3",
    "nfnet",
]


# The derivative of hard swish jumps at 3 and -3, where codes may be on the other side.
JUMPS = {"mobilenetv3": 0.9994}


@pytest.mark.parametrize("module", MODULES)
def test_razor_on(module):
    if not timm.is_model(architectures.CASES[module].model):
        pytest.skip("a later timm has it")
    row = architectures.check(architectures.CASES[module])
    low = [f"the cosine is below {architectures.COSINE}"] if module in JUMPS else []
    assert row["faults"] == low, row
    assert row["cosine"] >= JUMPS.get(module, architectures.COSINE)
