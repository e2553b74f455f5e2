"""Training by several processes: gradients are the average of what each process has alone."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from timm import create_model
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from razorctl import Recipe, restore, sparsify
from razorctl.layers.kinds.linear import Linear
from razorctl.memory.draws import joint_draws
from razorctl.methods import EXACT, METHODS, Method
from razorctl.sampling.reduction import mean_over_processes
from razorctl.surgery.byte_budget import sparsify_within
from razorctl.surgery.reruns import attached
from tests import forked
from tests.models import gpt2, llama, segformer, vit

WORLD = 2
# Float gradients, so that another order of sums stays a rounding.
RAZOR = Recipe("razor", 0.5, int8_weight_grad=False, int8_input_grad=False)
JOINT = (("full", "weights"), ("prebackrazor++", "weights"), ("full", "branches"))


def build(method: str, joint_budget: float = 1.0, joint: str = "weights") -> nn.Module:
    torch.manual_seed(0)
    model = VisionTransformer(
        img_size=8, patch_size=4, embed_dim=16, depth=2, num_heads=2, num_classes=3, init_values=0.1
    )
    sparsify(model, Recipe(method, 0.5, joint_budget, joint))
    for module in model.modules():
        if isinstance(module, Linear):
            module.SMALLEST = 0  # int8 GEMMs whatever the size
    return model


def alone(method: str, **options) -> list[list[torch.Tensor | None]]:
    """The gradients that each process would have by itself."""
    gradients = []
    for rank in range(WORLD):
        model = build(method, **options)
        for module in model.modules():
            rules = getattr(module, "rules", None)
            if rules and (sampler := getattr(rules.wide, "sampler", None)):
                sampler.phase += rank / WORLD  # as where processes know of each other
        backward(model, rank)
        gradients.append([p.grad for p in model.parameters() if p.requires_grad])
    return gradients


def backward(model: nn.Module, rank: int) -> None:
    torch.manual_seed(100 + rank)  # data and draws differ between processes
    model(torch.randn(5, 3, 8, 8)).square().sum().backward()


def own_loss(model: nn.Module) -> Tensor:
    ids = torch.randint(50, (2, 9))
    return model(input_ids=ids, labels=ids).loss


def tokens(model: nn.Module) -> Tensor:
    ids = torch.randint(50, (2, 9))
    logits = model(input_ids=ids).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def enlarged(model: nn.Module) -> Tensor:
    logits = model(pixel_values=torch.randn(2, 3, 32, 32)).logits
    logits = F.interpolate(logits, (32, 32), mode="bilinear")
    return F.cross_entropy(logits, torch.randint(5, (2, 32, 32)))


def small_images(model: nn.Module) -> Tensor:
    y: Tensor = model(torch.randn(4, 3, 16, 16))
    return y.square().mean()


def images(model: nn.Module) -> Tensor:
    return F.cross_entropy(model(torch.randn(4, 3, 32, 32)), torch.randint(5, (4,)))


class Wave(nn.Module):
    """A block that no layer knows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 48), nn.Linear(48, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.sin(self.first(x)))


def waves() -> nn.Module:
    """Blocks that run again."""
    model = nn.Sequential(*[Wave() for _ in range(4)], nn.Linear(16, 5))
    sparsify_within(model, replace(RAZOR, ratio=0.75), torch.randn(64, 16))
    assert sum(map(attached, model.modules())) == 4
    return model


def rows(model: nn.Module) -> Tensor:
    return F.cross_entropy(model(torch.randn(64, 16)), torch.randint(5, (64,)))


# By kinds of layers and losses: a model, its loss, and how DistributedDataParallel takes it.
UNUSED = {"find_unused_parameters": True, "gradient_as_bucket_view": True}  # as finetune does
KINDS = {
    "loss of its own": (gpt2, own_loss, UNUSED),
    "logits": (gpt2, tokens, {}),
    "logits through a sink": (llama, tokens, UNUSED),
    "logits in a static graph": (llama, tokens, {"static_graph": True}),
    "enlarged logits": (segformer, enlarged, {}),
    "enlarged logits through a sink": (segformer, enlarged, UNUSED),
    "batch norms and pools": (lambda: create_model("test_resnet"), images, UNUSED),
    "gates and group norms": (lambda: create_model("test_efficientnet_gn"), images, UNUSED),
    "layer norms of images": (lambda: create_model("test_convnext"), images, UNUSED),
    "blocks that run again": (waves, rows, UNUSED),
    "blocks that run again in a static graph": (waves, rows, {"static_graph": True}),
}


def two_steps(kind: str, rank: int, together: bool) -> list[list[Tensor]]:
    """The gradients of two steps, of the second with what the first one has learned."""
    build, loss, options = KINDS[kind]
    torch.manual_seed(0)
    model = build().train()
    if build is not waves:
        sparsify(model, RAZOR)
    called = DistributedDataParallel(model, **options) if together else model
    steps = []
    for step in range(2):
        model.zero_grad()
        torch.manual_seed(100 + 10 * step + rank)
        loss(called).backward()
        steps.append([p.grad.clone() for p in model.parameters()])
    return steps


RULES = {kind: "8-bit-again" for kind in METHODS["int8"].rules if kind not in EXACT}
AGAIN = Method(**vars(METHODS["half"]) | {"name": "again", "rules": RULES | EXACT})


def linear(module: nn.Module) -> bool:
    return isinstance(module, (nn.Linear, nn.LayerNorm))


def attentions(module: nn.Module) -> bool:
    return "Attention" in type(module).__name__ and hasattr(module, "config")


def stem(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.conv._ConvNd)


def batch_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.BatchNorm2d)


# By what FSDP2 wraps alone: a model, a loss, the method, and the modules. It wraps before
# `sparsify` where the kind says so.
SHARDED = {
    "linear layers": (llama, tokens, "again", linear),
    "attention": (llama, tokens, "again", attentions),
    "norms": (lambda: vit(init_values=0.5), small_images, "int8", linear),
    "convolutions": (lambda: create_model("test_resnet"), images, "int8", stem),
    "linear layers before": (llama, tokens, "again", linear),
    "batch norms before": (lambda: create_model("test_resnet"), images, "int8", batch_norm),
}


def sharded_step(kind: str, rank: int, together: bool) -> list[Tensor]:
    """The gradients of a step."""
    build, loss, method, wraps = SHARDED[kind]
    torch.manual_seed(0)
    model = build().train()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # else it is zero, as memory that is freed may be
            nn.init.normal_(parameter)

    def shard() -> None:
        mesh = init_device_mesh("cpu", (WORLD,))
        for module in filter(wraps, list(model.modules())):
            fully_shard(module, mesh=mesh)
        fully_shard(model, mesh=mesh)

    before = kind.endswith("before")
    if together and before:
        shard()
    with patch.dict(METHODS, again=AGAIN):
        sparsify(model, Recipe(method))
    if together and not before:
        shard()
    torch.manual_seed(100 + rank)
    loss(model).backward()
    grads = [p.grad for p in model.parameters()]
    restore(model)
    if not together:
        return grads
    assert all(isinstance(module, FSDPModule) for module in filter(wraps, model.modules()))
    return [grad.full_tensor() for grad in grads]


def process(rank: int, folder: str) -> None:
    """Saves what the tests compare; one start of both processes serves every method."""
    torch.set_num_threads(1)  # as in the process that compares
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=WORLD)
    averaged, drawn = {}, {}
    for method in METHODS:
        model = DistributedDataParallel(build(method))
        backward(model, rank)
        averaged[method] = [p.grad for p in model.parameters() if p.requires_grad]
    for method, joint in JOINT:
        stock = build(method, 0.5, joint)
        model = DistributedDataParallel(stock, find_unused_parameters=True)
        steps = drawn[method, joint] = []
        for _ in range(3):
            model.zero_grad()
            backward(model, rank)
            gradients = [p.grad for p in model.parameters()]
            steps.append((gradients, joint_draws(stock)[0].sampler.p.clone()))
    stepped = {kind: two_steps(kind, rank, together=True) for kind in KINDS}
    sharded = {kind: sharded_step(kind, rank, together=True) for kind in SHARDED}
    norms = {rank: torch.tensor(4.0), 2: torch.tensor(1.0 + rank)}
    means = mean_over_processes(norms, 4, torch.device("cpu"))
    torch.save((averaged, drawn, stepped, sharded, means), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Of each process: gradients by method, of three steps with a joint budget also p, gradients
    by kind, norms.
    """
    folder = tmp_path_factory.mktemp("ranks")
    forked.prepare()
    mp.start_processes(process, (str(folder),), nprocs=WORLD, start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


@pytest.mark.parametrize("method", METHODS)
def test_gradients_are_averaged(method, ranks):
    want = [torch.stack(grads).mean(0) for grads in zip(*alone(method), strict=True)]
    for averaged, *_ in ranks:
        for a, b in zip(averaged[method], want, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_every_kind_are_averaged(kind, ranks):
    each = [two_steps(kind, rank, together=False) for rank in range(WORLD)]
    for *_, stepped, _, _ in ranks:
        for got, *grads in zip(stepped[kind], *each, strict=True):
            want = [torch.stack(pair).mean(0) for pair in zip(*grads, strict=True)]
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", SHARDED)
def test_what_fsdp2_frees_is_gathered(kind, ranks):
    each = [sharded_step(kind, rank, together=False) for rank in range(WORLD)]
    want = torch.cat([torch.stack(pair).mean(0).flatten() for pair in zip(*each, strict=True)])
    for *_, sharded, _ in ranks:
        got = torch.cat([grad.flatten() for grad in sharded[kind]])
        assert (got - want).norm() < 1e-4 * want.norm()


def test_norms_are_means_over_the_processes_that_have_them(ranks):
    for *_, (index, means) in ranks:
        assert index.tolist() == [0, 1, 2]
        assert means.tolist() == [4.0, 4.0, 1.5]


@pytest.mark.parametrize(("method", "joint"), JOINT)
def test_processes_draw_the_same_blocks(method, joint, ranks):
    (first, p), (second, q) = (zip(*drawn[method, joint], strict=True) for _, drawn, *_ in ranks)
    assert all(map(torch.equal, p, q))
    assert not torch.equal(p[0], p[-1])
    for a, b in zip(first, second, strict=True):
        assert any(grad is None for grad in a)
        for one, other in zip(a, b, strict=True):
            torch.testing.assert_close(one, other)
    for got, *grads in zip(first[0], *alone(method, joint_budget=0.5, joint=joint), strict=True):
        want = None if grads[0] is None else torch.stack(grads).mean(0)
        torch.testing.assert_close(got, want)
