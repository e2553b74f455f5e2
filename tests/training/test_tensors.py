"""Files of tensors, read by safetensors itself; and the state of a run beside them."""

import pytest
import torch
from safetensors.torch import load_file, load_model
from torch import nn

from razorctl.training import state, tensors


def test_safetensors_reads_what_is_written(tmp_path):
    wanted = {
        "matrix": torch.randn(3, 5),
        "transposed": torch.randn(3, 5).T,
        "part": torch.randn(4, 4)[1:3, ::2],
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "none": torch.empty(0, 7),
        **{str(dtype): torch.ones(3).to(dtype) for dtype in tensors.DTYPES},
    }
    with (tmp_path / "file").open("wb") as file:
        tensors.write(file, wanted)
    for found in (load_file(tmp_path / "file"), tensors.read(tmp_path / "file")):
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight


def test_tied_weights_are_written_once_and_loaded_twice(tmp_path):
    model = Tied()
    with (tmp_path / "file").open("wb") as file:
        tensors.write(file, model.state_dict())
    assert tensors.nbytes(model.state_dict()) == 7 * 4 * 4
    assert (tmp_path / "file").stat().st_size < 7 * 4 * 4 + 300
    for load in (load_model, lambda net, file: net.load_state_dict(tensors.read(file))):
        other = Tied()
        load(other, tmp_path / "file")
        assert torch.equal(other.head.weight, model.embedding.weight)
        assert other.head.weight is other.embedding.weight


def test_a_state_comes_back_with_its_keys_and_numbers(tmp_path):
    wanted = {
        "state": {0: {"momentum": torch.randn(3), "none": None}, 7: {}},
        "groups": [{"lr": 0.1 + 0.2, "betas": [0.9, 0.999], "on": True}],
        "infinite": float("inf"),
        "of an object": torch.tensor(1),
    }
    state.write(tmp_path, nn.Linear(2, 2).state_dict(), wanted)
    restored = state.read(tmp_path)
    assert torch.equal(restored["state"][0].pop("momentum"), wanted["state"][0].pop("momentum"))
    assert restored == wanted


def test_random_states_repeat_every_generator():
    import random

    import numpy

    def numbers() -> list[float]:
        return [torch.rand(()).item(), random.random(), numpy.random.rand(), random.gauss(0, 1)]

    numbers()
    before = state.random_states()
    first = [*numbers(), *numbers()]
    state.set_random_states(before)
    assert [*numbers(), *numbers()] == first


def test_a_file_that_is_cut_is_no_file_of_tensors(tmp_path):
    with (tmp_path / "file").open("wb") as file:
        tensors.write(file, {"x": torch.ones(100)})
    (tmp_path / "file").write_bytes((tmp_path / "file").read_bytes()[:-4])
    with pytest.raises(Exception, match=r"(?i)incomplete"):
        tensors.read(tmp_path / "file")
