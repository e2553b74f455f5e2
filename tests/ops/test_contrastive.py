"""The loss of finding texts in a batch, against cross-entropy over a matrix of similarities."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from razorctl.ops import contrastive
from razorctl.ops.contrastive import Similarity, embedding_loss, ranking_loss


def vectors(rows: int, texts: int) -> Tensor:
    return F.normalize(torch.randn(rows, texts, 8, dtype=torch.double), dim=-1).requires_grad_()


def wanted(embeddings: Tensor, ids: Tensor, symmetric: bool) -> Tensor:
    """The sum over rows, from the whole matrix."""
    rows, texts = ids.shape
    places = [(row, text) for text in range(1, texts) for row in range(rows)]

    def loss(of: int, candidates: list[tuple[int, int]], other: int) -> Tensor:
        found = torch.stack([embeddings[place] for place in candidates])
        similarities = embeddings[:, of] @ found.T / 0.05
        for row in range(rows):
            for column, place in enumerate(candidates):
                same = ids[place] in (ids[row, of], ids[row, other])
                same |= place[1] == other and ids[place[0], of] == ids[row, of]
                if place != (row, other) and same:
                    similarities[row, column] = -torch.inf
        own = [candidates.index((row, other)) for row in range(rows)]
        return F.cross_entropy(similarities, torch.tensor(own), reduction="sum")

    forward = loss(0, places, 1)
    if not symmetric:
        return forward
    return (forward + loss(1, [(row, 0) for row in range(rows)], 0)) / 2


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("texts", [2, 4])
@pytest.mark.parametrize("part", [contrastive.PART, 20])
def test_equal_texts_of_a_batch_are_no_negatives(texts, symmetric, part, monkeypatch):
    monkeypatch.setattr(contrastive, "PART", part)
    embeddings, ids = vectors(6, texts), torch.arange(1, 6 * texts + 1).view(6, texts)
    ids[3, 0] = ids[0, 0]  # another text to find for the same one
    ids[4, 1] = ids[1, 1]
    ids[5, -1] = ids[2, 0]
    want = wanted(embeddings, ids, symmetric)
    with torch.autocast("cpu", torch.bfloat16):
        similarity = Similarity(20, symmetric=symmetric)
        got = ranking_loss(embeddings, ids, similarity)
        mean = embedding_loss(embeddings.bfloat16(), ids, similarity, "mean")
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(mean, want.float() / 6, rtol=2e-2, atol=2e-2)
    gradients = [torch.autograd.grad(loss.pow(2), embeddings)[0] for loss in (got, want)]
    torch.testing.assert_close(*gradients)


def test_scores_are_learned_as_cosines():
    embeddings, scores = vectors(5, 2), torch.rand(5)
    want = F.mse_loss(F.cosine_similarity(*embeddings.float().unbind(1)), scores)
    torch.testing.assert_close(embedding_loss(embeddings, scores, Similarity(20), "mean"), want)


def of_clip(images: Tensor, texts: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """The sum over rows of the loss of CLIP's paper, figure 3."""
    logits, places = images @ texts.T * scale, torch.arange(len(images))
    both = (F.cross_entropy(each, places, reduction="sum") for each in (logits, logits.T))
    return sum(both) / 2


def of_siglip(images: Tensor, texts: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """The sum over rows of the loss of SigLIP's paper, algorithm 1."""
    signs = 2 * torch.eye(len(images)) - 1
    return -F.logsigmoid(signs * (images @ texts.T * scale + bias)).sum()


@pytest.mark.parametrize("wanted", [of_clip, of_siglip])
@pytest.mark.parametrize("part", [contrastive.PART, 20])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_learned_scale_and_bias_have_gradients(wanted, part, shape, monkeypatch):
    monkeypatch.setattr(contrastive, "PART", part)
    embeddings, ids = vectors(9, 2), torch.arange(1, 19).view(9, 2)
    scale, bias = (torch.full(shape, x, dtype=torch.double).requires_grad_() for x in (12.0, -3.0))
    similarity = Similarity(scale, None if wanted is of_clip else bias, symmetric=True)
    got = ranking_loss(embeddings, ids, similarity)
    want = wanted(*embeddings.unbind(1), scale, bias)
    torch.testing.assert_close(got, want.view(()))
    leaves = (embeddings, scale) if wanted is of_clip else (embeddings, scale, bias)
    gradients = [torch.autograd.grad(loss.sum() ** 2, leaves) for loss in (got, want)]
    torch.testing.assert_close(*gradients)


def test_equal_images_and_texts_are_no_negatives_of_sigmoid():
    embeddings, ids = vectors(5, 2), torch.arange(1, 11).view(5, 2)
    ids[3, 0], ids[4, 1] = ids[0, 0], ids[1, 1]
    scale, bias = torch.tensor(12.0), torch.tensor(-3.0)
    got = ranking_loss(embeddings, ids, Similarity(scale, bias))
    counts = torch.ones(5, 5)
    for row, column in ((0, 3), (3, 0), (1, 4), (4, 1)):
        counts[row, column] = 0
    logits = embeddings[:, 0] @ embeddings[:, 1].T * scale + bias
    want = -(F.logsigmoid((2 * torch.eye(5) - 1) * logits) * counts).sum()
    torch.testing.assert_close(got, want)
