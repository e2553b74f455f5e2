"""Data-parallel training: gradients are the average of what each process has alone."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from razorctl import Recipe, sparsify
from razorctl.recipe import METHODS

WORLD = 2


def build(method: str) -> nn.Module:
    torch.manual_seed(0)
    model = VisionTransformer(
        img_size=8, patch_size=4, embed_dim=16, depth=2, num_heads=2, num_classes=3, init_values=0.1
    )
    sparsify(model, Recipe(method, ratio=0.5))
    return model


def backward(model: nn.Module, rank: int) -> None:
    torch.manual_seed(100 + rank)  # data and draws differ between processes
    model(torch.randn(5, 3, 8, 8)).square().sum().backward()


def process(rank: int, method: str, folder: str) -> None:
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=WORLD)
    model = DistributedDataParallel(build(method))
    backward(model, rank)
    torch.save([p.grad for p in model.parameters()], f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("method", METHODS)
def test_gradients_are_averaged(method, tmp_path):
    mp.spawn(process, (method, str(tmp_path)), nprocs=WORLD)
    alone = []
    for rank in range(WORLD):
        model = build(method)
        backward(model, rank)
        alone.append([p.grad for p in model.parameters()])
    want = [torch.stack(grads).mean(0) for grads in zip(*alone, strict=True)]
    for rank in range(WORLD):
        for a, b in zip(torch.load(tmp_path / f"{rank}.pt"), want, strict=True):
            torch.testing.assert_close(a, b)
