"""Exports to ONNX that fail, and models of images."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from razorctl import models
from razorctl.config.job import Job
from razorctl.errors import RazorError
from razorctl.training.exporting import onnx_model
from razorctl.training.predicting.inference import Trained
from tests.models import altered


def of_values(x: Tensor) -> Tensor:
    """Rows of one of two widths, by the values of the images."""
    return x[:, :2] if x.sum() > 0 else x


# What a model does with its logits -> what is said of it.
FAULTS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "by values": (of_values, r"run cannot be exported to ONNX \(.*\); export it with --to safe"),
    "at random": (lambda x: F.dropout(x, 0.5), "other logits than the run's, by up to .*; export"),
}


def trained(after: Callable[[Tensor], Tensor] = lambda x: x) -> Trained:
    """A linear classifier of images, as of a run."""

    def logits(model: nn.Module, images: Any) -> Tensor:
        return after(model(images.flatten(1)))

    def example(_: nn.Module, batch: int, size: int | None) -> Tensor:
        return torch.zeros(batch, 1, 28, 28)

    family = altered(models.find("vit-micro"), logits=logits, example=example)
    job, model = Job("vit-micro", "digits"), nn.Linear(28 * 28, 10).eval()
    place = Path("run")
    return Trained(place, place, {}, job, family, model, None, torch.device("cpu"))


def test_a_model_of_images_takes_batches_of_any_size(tmp_path):
    import onnxruntime

    found = onnx_model.write(own := trained(), tmp_path)
    assert found["inputs"] == {"pixel_values": ["batch", 1, 28, 28]}
    assert found["outputs"] == {"logits": ["batch", 10]}
    images = torch.randn(7, 1, 28, 28)
    session = onnxruntime.InferenceSession(tmp_path / onnx_model.FILE)
    (logits,) = session.run(None, {"pixel_values": images.numpy()})
    torch.testing.assert_close(torch.from_numpy(logits), own.family.logits(own.model, images))


@pytest.mark.parametrize("fault", FAULTS)
def test_what_onnx_cannot_be_is_one_sentence(fault, tmp_path, capfd):
    after, sentence = FAULTS[fault]
    with pytest.raises(RazorError, match=sentence) as caught:
        onnx_model.write(trained(after), tmp_path)
    assert caught.value.exit_code == 1
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")  # torch would print whole graphs


class Counting(nn.Module):
    """Reads the batch size by the built-in `len`, as RT-DETR does."""

    def forward(self, x: Tensor) -> Tensor:
        return x.new_ones(len(x), len("two")) + x[:, :3]


def test_a_length_leaves_the_batch_size_free():
    x, axes = torch.randn(2, 4), ({0: torch.export.Dim.DYNAMIC},)
    with onnx_model._free_lengths(Counting()):
        program = torch.export.export(Counting(), (x,), dynamic_shapes=axes, strict=False)
    assert program.module()(torch.randn(5, 4)).shape == (5, 3)
    with pytest.raises(RuntimeError, match="specialized it to be a constant"):
        torch.export.export(Counting(), (x,), dynamic_shapes=axes, strict=False)
