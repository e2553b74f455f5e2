"""Losses of embeddings: of similarities over a batch, and of cosines with scores.

Queries q [n, d] and candidates c [m, d] are unit vectors, and z = s q·c + b are similarities with a
scale s, the inverse of a temperature, and a bias b. By softmax, b is 0, and a query's loss is
-log(exp(z+) / sum of exp(z)) over its own candidate c+ and its negatives (Henderson et al., 2017;
van den Oord et al., 2018, equation 4; Radford et al., 2021). By sigmoid it is -log(sigmoid(z+))
less the sum of log(sigmoid(-z)) over its negatives (Zhai et al., 2023, algorithm 1). Similarities
exist a part at a time: their gradient is computed with them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from razorctl.system import processes

PART = 1 << 22  # similarities that exist at a time


@dataclass(frozen=True)
class Similarity:
    """How cosines become a loss.

    Args:
        scale: s, fp32 [] or [1] if it is learned.
        bias: b, likewise; None for softmax.
        symmetric: whether softmax also finds the first of a row by the second; the loss is then the
            mean of both directions.
        directions: the names of both for figures, first to second one first; empty if only first
            ones search.
    """

    scale: Tensor | float
    bias: Tensor | None = None
    symmetric: bool = False
    directions: Sequence[str] = ()


class _Ranking(torch.autograd.Function):
    """The sum of the losses of queries; see `ranking_loss`, whose `own` and `allowed` these are."""

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        candidates: Tensor,
        scale: Tensor,
        bias: Tensor,
        ids: "_Ids",
        sigmoid: bool,
    ) -> Tensor:
        loss, of_bias = queries.new_zeros(()), queries.new_zeros(())
        of_queries, of_candidates = torch.empty_like(queries), torch.zeros_like(candidates)
        size, loss_of = max(1, PART // len(candidates)), _sigmoid if sigmoid else _softmax
        with torch.autocast(queries.device.type, enabled=False):
            for start in range(0, len(queries), size):
                rows = slice(start, start + size)
                q, own, excluded = queries[rows], ids.own[rows, None], ids.excluded(rows)
                similarities = (q @ candidates.T).mul_(scale).add_(bias)
                each, shares = loss_of(similarities, own, excluded)
                loss += each
                of_queries[rows] = shares @ candidates
                of_candidates += shares.T @ q
                of_bias += shares.sum()
        of_scale = (queries * of_queries).sum()  # q·(sum of shares times c) is a sum over cosines
        of_queries, of_candidates = of_queries.mul_(scale), of_candidates.mul_(scale)
        ctx.save_for_backward(of_queries, of_candidates, of_scale, of_bias)
        ctx.shapes = scale.shape, bias.shape
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        of_queries, of_candidates, *of_numbers = (grads[0] * each for each in ctx.saved_tensors)
        numbers = (each.view(of) for each, of in zip(of_numbers, ctx.shapes, strict=True))
        return of_queries, of_candidates, *numbers, None, None


def _softmax(similarities: Tensor, own: Tensor, excluded: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of losses by softmax, and their gradient, which takes the place of similarities."""
    similarities.masked_fill_(excluded, -torch.inf)
    total = similarities.logsumexp(1, keepdim=True)
    loss = (total - similarities.gather(1, own)).sum()
    shares = similarities.sub_(total).exp_()
    return loss, shares.scatter_add_(1, own, -torch.ones_like(own, dtype=shares.dtype))


def _sigmoid(similarities: Tensor, own: Tensor, excluded: Tensor) -> tuple[Tensor, Tensor]:
    """The same by sigmoid: log(1 + exp(z)) of negatives, and log(1 + exp(-z)) of the own ones."""
    similarities.masked_fill_(excluded, -torch.inf)
    similarities.scatter_(1, own, -similarities.gather(1, own))
    loss = F.softplus(similarities).sum()
    shares = similarities.sigmoid_()
    return loss, shares.scatter_(1, own, -shares.gather(1, own))


class _Ids:
    """Which candidates are the own one and the negatives of queries, by the numbers of texts.

    A candidate with the text of the query or of its own candidate is no negative, nor is one that
    belongs to another query with the same text.

    Args:
        queries, candidates: the number of each text.
        owners: for each candidate the number of the query that it belongs to; a negative of a row
            belongs to none, 0.
        own: for each query the place of its own candidate.
    """

    def __init__(self, queries: Tensor, candidates: Tensor, owners: Tensor, own: Tensor) -> None:
        self.queries, self.candidates, self.owners, self.own = queries, candidates, owners, own

    def excluded(self, rows: slice) -> Tensor:
        """Whether each candidate [rows, m] is neither the own one nor a negative."""
        query, own = self.queries[rows, None], self.own[rows, None]
        same = (self.candidates == query) | (self.owners == query)
        same |= self.candidates == self.candidates[own]
        return same.scatter_(1, own, False)


def ranking_loss(
    embeddings: Tensor, ids: Tensor, similarity: Similarity, shared: bool = True
) -> Tensor:
    """The sum over rows of the loss of finding the second text of a row by its first.

    Candidates are the second texts and the negatives of all rows. Texts may be images, too.

    Args:
        embeddings: unit vectors [rows, texts, d] of the first text of each row, of the one that it
            finds, and of any negatives.
        ids: [rows, texts], int64, equal for equal texts and never 0.
        shared: whether the rows of all processes are candidates, which is collective.
    """
    rows, first = len(embeddings), processes.rank() * len(embeddings) * shared
    every, numbers = embeddings, ids
    if shared:
        every, numbers = processes.gathered(embeddings), processes.gathered(ids)
    own = torch.arange(first, first + rows, device=ids.device)
    queries, found = numbers[:, 0], numbers[:, 1]
    owners = torch.zeros_like(numbers[:, 1:])
    owners[:, 0] = queries

    # Column by column, so that `own` is the place of a row's second text.
    flat = every[:, 1:].transpose(0, 1).flatten(0, 1)
    of_flat = _Ids(ids[:, 0], numbers[:, 1:].T.flatten(), owners.T.flatten(), own)
    numbers_of = [
        each.to(embeddings) if isinstance(each, Tensor) else embeddings.new_full((), each or 0.0)
        for each in (similarity.scale, similarity.bias)
    ]
    sigmoid = similarity.bias is not None
    forward: Tensor = _Ranking.apply(embeddings[:, 0], flat, *numbers_of, of_flat, sigmoid)
    if sigmoid or not similarity.symmetric:
        return forward
    of_first = _Ids(ids[:, 1], queries, found, own)
    first_ones = every[:, 0]
    backward: Tensor = _Ranking.apply(embeddings[:, 1], first_ones, *numbers_of, of_first, sigmoid)
    return (forward + backward) / 2


def embedding_loss(
    embeddings: Tensor, labels: Tensor, similarity: Similarity, reduction: str
) -> Tensor:
    """`ranking_loss`, or for scores the squared error of the cosines of two texts.

    labels: the `ids` of texts, or fp32 scores [rows]. reduction: "sum", or "mean" over the rows of
    this process.
    """
    embeddings = embeddings.float()
    if labels.is_floating_point():
        return F.mse_loss(embeddings.prod(1).sum(-1), labels, reduction=reduction)
    loss = ranking_loss(embeddings, labels, similarity)
    return loss / len(labels) if reduction == "mean" else loss
