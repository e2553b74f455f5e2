"""Mixed images and labels."""

import numpy
import pytest
import torch

from razorctl.config.job import Job
from razorctl.errors import UsageError
from razorctl.training.feed import mixing

IMAGES = torch.arange(4.0).view(4, 1, 1, 1).expand(4, 1, 8, 8)
LABELS = torch.tensor([0, 2, 1, 1])


def mixed(**settings):
    numpy.random.seed(0)
    return mixing(Job("m", "d", **settings), 3)((IMAGES.clone(), LABELS))


def test_without_mixing_a_batch_is_left_alone():
    batch = IMAGES, LABELS
    assert mixing(Job("m", "d", label_smoothing=0.1), 3)(batch) is batch


@pytest.mark.parametrize("settings", [{"mixup": 0.8}, {"cutmix": 1.0}])
def test_images_and_labels_are_mixed_alike(settings):
    images, shares = mixed(**settings)
    share = shares[0, 0].item()  # of image 0, the rest is of image 3, whose label is 1
    assert 0 < share < 1
    assert shares[0].tolist() == pytest.approx([share, 1 - share, 0])
    assert images[0].mean().item() == pytest.approx(3 * (1 - share), abs=1e-5)
    assert shares.sum(1).tolist() == pytest.approx([1] * 4)


def test_pairs_need_even_batches():
    with pytest.raises(UsageError, match="3 images"):
        Job("m", "d", steps=1, batch_size=6, accumulate=2, mixup=0.2).resolved({}, 10)
