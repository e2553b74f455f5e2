"""Losses of embeddings: cross-entropy of similarities over a batch, and of cosines with scores.

Queries q [n, d] and candidates c [m, d] are unit vectors, and t is a temperature. A query's loss is
-log(exp(q·c+ / t) / sum of exp(q·c / t)) over its own candidate c+ and its negatives (Henderson et
al., 2017; van den Oord et al., 2018, equation 4). Similarities exist a part at a time: their
gradient is computed with them.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from razorctl.system import processes

PART = 1 << 22  # similarities that exist at a time


class _Ranking(torch.autograd.Function):
    """The sum of the losses of queries; see `ranking_loss`, whose `own` and `allowed` these are."""

    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, candidates: Tensor, ids: "_Ids", temperature: float
    ) -> Tensor:
        loss, of_queries = queries.new_zeros(()), torch.empty_like(queries)
        of_candidates = torch.zeros_like(candidates)
        size = max(1, PART // len(candidates))
        with torch.autocast(queries.device.type, enabled=False):
            for start in range(0, len(queries), size):
                rows = slice(start, start + size)
                q, own = queries[rows], ids.own[rows, None]
                similarities = (q @ candidates.T).div_(temperature)
                similarities.masked_fill_(ids.excluded(rows), -torch.inf)
                total = similarities.logsumexp(1, keepdim=True)
                loss += (total - similarities.gather(1, own)).sum()
                shares = similarities.sub_(total).exp_()
                shares.scatter_add_(1, own, -torch.ones_like(own, dtype=shares.dtype))
                of_queries[rows] = shares @ candidates
                of_candidates += shares.T @ q
        ctx.save_for_backward(of_queries.div_(temperature), of_candidates.div_(temperature))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        of_queries, of_candidates = ctx.saved_tensors
        return grads[0] * of_queries, grads[0] * of_candidates, None, None


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
    embeddings: Tensor, ids: Tensor, temperature: float, symmetric: bool, shared: bool = True
) -> Tensor:
    """The sum over rows of the loss of finding the second text of a row by its first.

    Candidates are the second texts and the negatives of all rows.

    Args:
        embeddings: unit vectors [rows, texts, d] of the first text of each row, of the one that it
            finds, and of any negatives.
        ids: [rows, texts], int64, equal for equal texts and never 0.
        symmetric: whether first texts are found by second ones too; the loss is then the mean of
            both directions.
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
    forward: Tensor = _Ranking.apply(embeddings[:, 0], flat, of_flat, temperature)
    if not symmetric:
        return forward
    of_first = _Ids(ids[:, 1], queries, found, own)
    backward: Tensor = _Ranking.apply(embeddings[:, 1], every[:, 0], of_first, temperature)
    return (forward + backward) / 2


def embedding_loss(
    embeddings: Tensor, labels: Tensor, temperature: float, symmetric: bool, reduction: str
) -> Tensor:
    """`ranking_loss`, or for scores the squared error of the cosines of two texts.

    labels: the `ids` of texts, or fp32 scores [rows]. reduction: "sum", or "mean" over the rows of
    this process.
    """
    embeddings = embeddings.float()
    if labels.is_floating_point():
        return F.mse_loss(embeddings.prod(1).sum(-1), labels, reduction=reduction)
    loss = ranking_loss(embeddings, labels, temperature, symmetric)
    return loss / len(labels) if reduction == "mean" else loss
