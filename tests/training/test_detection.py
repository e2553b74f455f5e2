"""Detection: inputs with boxes, losses by the matchers of transformers, and average precision."""

from contextlib import contextmanager

import pytest
import torch
from PIL import Image
from torch.utils.data import default_collate
from torchvision.ops import generalized_box_iou
from transformers.loss import loss_rt_detr

from razorctl import Recipe, models
from razorctl.config.job import Job
from razorctl.errors import DataError, UsageError
from razorctl.memory.job_forward import JobForward
from razorctl.memory.saved import kept_storages, traced_bytes
from razorctl.models import boxes
from razorctl.models.boxes import DRAWN
from razorctl.models.transformers import matched_losses
from razorctl.surgery.byte_budget import sparsify_within
from razorctl.training.detections import AveragePrecision
from razorctl.training.evaluation import evaluate
from razorctl.training.feed import mixing
from tests.detectors import KINDS, detector

JOB = Job("m", "d", task="detection", precision="fp32", batch_size=2)
CONFIG = {
    "input_size": (3, 64, 64),
    "mean": (0.0, 0.0, 0.0),
    "std": (1.0, 1.0, 1.0),
    "interpolation": "bilinear",
    "most": 5,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    top = tmp_path_factory.mktemp("detectors")
    return {kind: detector(kind, top / kind) for kind in KINDS}


def rows(size=(40, 20), box=(10.0, 5.0, 30.0, 15.0), label=(2,), **more):
    """A row with a black image that is white in the box."""
    image = Image.new("RGB", size)
    image.paste("white", [*map(int, box)])
    return {"image": [image], "boxes": [[list(box)] * len(label)], "label": [[*label]], **more}


@pytest.mark.parametrize(
    ("letterbox", "mask"), [(False, False), (False, True), (True, False), (True, True)]
)
def test_a_box_lies_where_its_pixels_do(letterbox, mask):
    config = {**CONFIG, "letterbox": letterbox, "mask": mask}
    batch = boxes.transform(config)(rows())
    inputs, labels = batch["inputs"][0], batch["labels"][0]
    assert labels.tolist() == [2, -100, -100, -100, -100]
    pixels = inputs["pixel_values"]
    # What boxes are shares of: the image, or the whole input.
    high, wide = (32, 64) if letterbox and mask else (64, 64)
    center_x, center_y, width, height = inputs["boxes"][0].tolist()
    of = (
        slice(round((center_y - height / 2) * high), round((center_y + height / 2) * high)),
        slice(round((center_x - width / 2) * wide), round((center_x + width / 2) * wide)),
    )
    assert pixels[:, of[0], of[1]].mean() > 0.9
    assert pixels.sum() < 1.1 * pixels[:, of[0], of[1]].sum()
    extent = inputs["extent"]
    assert (inputs["boxes"][0] * extent.repeat(2)).tolist() == [20, 10, 20, 10]
    if mask:
        assert inputs["pixel_mask"].sum() == (32 if letterbox else 64) * 64
    assert ("pixel_mask" in inputs) == mask


def test_groups_of_objects_and_images_without_objects():
    config = {**CONFIG, "letterbox": False, "mask": False}
    batch = boxes.transform(config)(rows(label=(1, 0), crowd=[[True, False]]))
    assert batch["labels"][0].tolist() == [-100, 0, -100, -100, -100]
    assert batch["inputs"][0]["crowd"].tolist() == [1, -100, -100, -100, -100]
    targets = matched_losses.targets(
        batch["inputs"][0]["boxes"][None], batch["labels"][0][None], [1]
    )
    assert targets[0]["class_labels"].tolist() == [0]
    assert torch.equal(targets[0]["boxes"][0], batch["inputs"][0]["boxes"][1])
    empty = boxes.transform(config)(rows(label=()))
    assert (empty["labels"][0] == -100).all()
    unlabeled = boxes.transform(config)({"image": rows()["image"]})
    assert "labels" not in unlabeled
    assert "boxes" not in unlabeled["inputs"][0]


@pytest.mark.parametrize("augment", ["crop", "rand"])
def test_random_crops_keep_boxes_on_their_pixels(augment):
    config = {**CONFIG, "letterbox": False, "mask": False}
    change, found = boxes.augmented(config, augment), 0
    for seed in range(12):
        torch.manual_seed(seed)
        batch = change(rows((80, 80), (20.0, 20.0, 60.0, 50.0)))
        inputs = batch["inputs"][0]
        if (batch["labels"][0] < 0).all():
            continue
        x, y, width, height = (64 * inputs["boxes"][0]).tolist()
        left, right = max(0, round(x - width / 4)), round(x + width / 4)
        top, bottom = max(0, round(y - height / 4)), round(y + height / 4)
        inside = inputs["pixel_values"].mean(0)[top : bottom + 1, left : right + 1]
        assert inside.mean() > 1.2 * inputs["pixel_values"].mean() or inside.mean() > 0.8
        found += 1
    assert found > 8


def test_scales_change_pixels_and_no_shares(folders):
    config = {**CONFIG, "letterbox": True, "mask": True}
    batch = default_collate(boxes.transform(config)(rows())["inputs"])
    job = Job("m", "d", task="detection", scales="32,64")
    sides = set()
    for _ in range(20):
        inputs, _ = mixing(job, 3)((batch, torch.zeros(1, 5)))
        side = inputs["pixel_values"].shape[-1]
        sides.add(side)
        assert inputs["pixel_mask"].sum() == side * side // 2
        assert torch.equal(inputs["boxes"], batch["boxes"])
    assert sides == {32, 64}
    with pytest.raises(UsageError, match="largest of the scales is 64, and the input size 96"):
        Job("m", "d", scales="32,64", input_size=96)
    family = models.find(str(folders["rt_detr"]))
    with pytest.raises(UsageError, match="takes images of a multiple of 32 pixels, not 50"):
        family.fed(Job("m", "d", task="detection", scales="50,64"))
    with pytest.raises(UsageError, match="'32,x' are not sizes"):
        Job("m", "d", scales="32,x")


def drawn_batch(family, model):
    """A batch of random images, each with as many objects as in a trace."""
    draw = torch.Generator().manual_seed(0)
    inputs, labels = family.batch(model, 2, None, 3)
    inputs["pixel_values"] = torch.rand(inputs["pixel_values"].shape, generator=draw)
    inputs["boxes"] = 0.3 + 0.3 * torch.rand(inputs["boxes"].shape, generator=draw)
    labels[:, :DRAWN] = torch.randint(3, (2, DRAWN), generator=draw)
    return inputs, labels


# Both for a matcher of sigmoids and for one of softmax, else one.
PRECISIONS = {
    "detr": ("fp32", "bf16"),
    "deformable_detr": ("bf16",),
    "rt_detr": ("fp32", "bf16"),
    "rt_detr_v2": ("fp32",),
    "d_fine": ("bf16",),
    "yolos": ("bf16",),
}


@pytest.mark.parametrize(
    ("kind", "precision"), [(kind, each) for kind in KINDS for each in PRECISIONS[kind]]
)
def test_a_trace_without_values_counts_what_a_step_stores(kind, precision, folders):
    family = models.find(str(folders[kind]))
    model, of = family.build(3).train(), {"task": "detection", "precision": precision}
    forward = JobForward(family, Job("m", "d", batch_size=2, **of), 3)
    batch, autocast = drawn_batch(family, model), torch.autocast("cpu", enabled=precision == "bf16")
    stored = None
    for recipe in (None, Recipe("razor", ratio=0.3)):
        if recipe is not None:
            sparsify_within(model, recipe, batch, **forward.options, full=stored)

        def loss():
            with autocast:
                return forward.loss(model, batch)

        torch.manual_seed(0)
        stored = sum(each.size for each in kept_storages(model, loss, lambda: None))
        assert traced_bytes(model, batch, **forward.options) == stored


@pytest.mark.parametrize("kind", KINDS)
def test_pairs_of_boxes_are_compared_as_in_the_matrix_of_all(kind, folders, monkeypatch):
    family = models.find(str(folders[kind]))
    model = family.build(3).train()
    batch, losses = drawn_batch(family, model), family.losses(JOB)

    def gradient():
        model.zero_grad()
        torch.manual_seed(0)
        loss = losses(model, *batch, "mean")
        loss.backward()
        weights = (p for p in model.parameters() if p.grad is not None and p.dim() > 1)
        return loss, torch.cat([weight.grad.flatten() for weight in weights])

    @contextmanager
    def stock(traced):
        yield

    loss, grad = gradient()
    monkeypatch.setattr(matched_losses, "stand_ins", stock)
    expected, expected_grad = gradient()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-4, atol=1e-5 * float(grad.abs().max()))


def test_other_entries_of_the_matrix_are_unusable():
    here = torch.tensor([[0.0, 0.0, 2.0, 2.0], [1.0, 1.0, 4.0, 3.0]], requires_grad=True)
    there = torch.tensor([[1.0, 0.0, 3.0, 2.0], [5.0, 5.0, 6.0, 6.0]])
    with matched_losses.stand_ins(traced=False):
        matrix = loss_rt_detr.generalized_box_iou(here, there)
        with torch.no_grad():  # as in a matcher
            whole = loss_rt_detr.generalized_box_iou(here, there)
    torch.testing.assert_close(matrix.diag(), generalized_box_iou(here, there).diag())
    assert matrix[0, 1].isnan()
    assert whole.isfinite().all()


def test_micro_batches_weigh_as_their_objects_do(folders):
    family = models.find(str(folders["rt_detr"]))
    model, (inputs, labels) = family.build(3).eval(), drawn_batch(family, family.build(3))
    labels[1, 3:] = -100
    losses = family.losses(JOB)
    parts = [{name: value[at : at + 1] for name, value in inputs.items()} for at in (0, 1)]
    each = [losses(model, part, labels[at : at + 1], "sum").item() for at, part in enumerate(parts)]
    whole = losses(model, inputs, labels, "mean").item()
    assert sum(each) / (DRAWN + 3) == pytest.approx(whole)
    nothing = torch.full_like(labels, -100)
    assert losses(model, inputs, nothing, "sum").isfinite()


def test_average_precision():
    labels = torch.tensor([[0, 1, -100], [1, -100, -100]])
    crowd = torch.full_like(labels, -100)
    shares = torch.tensor([[0.2, 0.2, 0.2, 0.2], [0.7, 0.7, 0.4, 0.4], [0.5, 0.5, 1.0, 1.0]])
    inputs = {"boxes": shares.repeat(2, 1, 1), "crowd": crowd, "extent": torch.full((2, 2), 100.0)}
    guesses = torch.zeros(2, 4, 7)
    guesses[0, 0, 0], guesses[0, 0, 3:] = 0.9, shares[0]  # right
    guesses[0, 1, 1], guesses[0, 1, 3:] = 0.8, shares[1]  # right
    guesses[1, 0, 1], guesses[1, 0, 3:] = 0.7, torch.tensor([0.5, 0.5, 0.1, 0.1])  # elsewhere
    figures = AveragePrecision(["a", "b", "c"])
    figures.update(guesses, labels, inputs)
    values = figures.compute()
    # Of class 0 all are found; of class 1 the likelier one of two.
    half = 51 / 101  # of the recalls from 0 to 1, those that are reached
    assert values["map"].item() == pytest.approx((1 + half) / 2)
    assert "map_large" not in values
    assert values["by class labels"].tolist() == [1, 2, 0]
    assert values["by class average_precision"].tolist() == pytest.approx([1, half, 0])
    assert values["by class recall"].tolist() == pytest.approx([1, 0.5, 0])
    empty = AveragePrecision(["a", "b", "c"])
    empty.update(guesses, torch.full_like(labels, -100), {**inputs, "crowd": crowd})
    with pytest.raises(DataError, match="no image that is evaluated has a box"):
        empty.compute()
    # A guess inside a group of objects does not count.
    crowd[1, 1], inputs["boxes"][1, 1] = 1, shares[2]
    figures = AveragePrecision(["a", "b", "c"])
    figures.update(guesses, torch.where(labels == 1, -100, labels), inputs)
    assert figures.compute()["map"].item() == pytest.approx(1)


def test_an_evaluation_has_the_loss_and_the_figures(folders):
    family = models.find(str(folders["deformable_detr"]))
    model = family.build(3)
    batch = drawn_batch(family, model)
    evaluation = evaluate(model, family.losses(JOB), [batch], ["a", "b", "c"])
    assert evaluation.figures["loss"] > 0
    assert 0 <= evaluation.figures["map"] < 0.2
    assert sum(evaluation.by_class.labels) == 2 * DRAWN
