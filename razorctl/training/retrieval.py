"""How well embeddings find texts: ranks among all texts of the evaluated rows, and their loss."""

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from razorctl.ops.contrastive import PART, Similarity, ranking_loss

CUTS = (1, 5, 10)  # ranks up to which a text counts as found
RECALL = "recall_at_"


class Retrieval(Metric):
    """Each first text of a row searches the others of all rows, in all processes.

    Equal texts are one text. A text that several first texts find may be found by each. Of rows
    with an image and a text, images search texts and texts search images, and a figure is the mean
    of both directions; its recalls are also there for each, as `text_to_image_recall_at_1`. These
    recalls are shares of queries that find one of their answers, as published for CLIP and COCO.

    All figures are means over first texts, defined as in torchmetrics' `retrieval`, whose metrics
    would need a number for each pair of texts. `recall_at_K` is the share of the texts to find that
    are among the K most alike, `mrr` the inverse rank of the first of them, `ndcg_at_10` as in
    Järvelin and Kekäläinen, 2002. `loss` is that of training, over all rows as one batch.
    """

    full_state_update = False
    vectors: list[Tensor]
    numbers: list[Tensor]

    def __init__(self, similarity: Similarity) -> None:
        super().__init__()
        self.similarity = similarity
        for name in ("vectors", "numbers"):
            self.add_state(name, default=[], dist_reduce_fx="cat")

    def update(self, embeddings: Tensor, ids: Tensor) -> None:
        """embeddings: unit vectors [rows, texts, d]. ids: [rows, texts], equal for equal texts."""
        self.vectors.append(embeddings.float())
        self.numbers.append(ids)

    def compute(self) -> dict[str, Tensor]:
        vectors, numbers = (_joined(each) for each in (self.vectors, self.numbers))
        loss = ranking_loss(vectors, numbers, self.similarity, shared=False) / len(vectors)
        both = len(self.similarity.directions) > 0
        figures = _searched(vectors, numbers, both)
        if both:
            back = _searched(vectors.flip(1), numbers.flip(1), both)
            each = zip(self.similarity.directions, (figures, back), strict=True)
            figures = {name: (figures[name] + back[name]) / 2 for name in figures}
            for direction, of in each:
                recalls = (name for name in of if name.startswith(RECALL))
                figures |= {f"{direction}_{name}": of[name] for name in recalls}
        return {**figures, "loss": loss}


def _searched(vectors: Tensor, numbers: Tensor, one: bool) -> dict[str, Tensor]:
    """The mean figures of first texts that search the others; arguments: as of `update`.

    one: whether one answer counts as all.
    """
    figures: dict[str, list[Tensor]] = {}
    queries, of_rows = torch.unique(numbers[:, 0], return_inverse=True)
    texts, places = torch.unique(numbers[:, 1:], return_inverse=True)
    corpus = vectors.new_empty(len(texts), vectors.shape[-1])
    corpus[places.flatten()] = vectors[:, 1:].flatten(0, 1)
    searching = vectors.new_empty(len(queries), vectors.shape[-1])
    searching[of_rows] = vectors[:, 0]
    size = max(1, PART // len(texts))
    for start in range(0, len(queries), size):
        rows = (of_rows >= start) & (of_rows < start + size)
        q = searching[start : start + size]
        relevant = torch.zeros(len(q), len(texts), dtype=torch.bool, device=q.device)
        relevant[of_rows[rows] - start, places[rows, 0]] = True
        for name, values in _figures(q @ corpus.T, relevant, one).items():
            figures.setdefault(name, []).append(values)
    return {name: torch.cat(values).mean() for name, values in figures.items()}


def _figures(similarities: Tensor, relevant: Tensor, one: bool) -> dict[str, Tensor]:
    """The figures of each query, from similarities and relevance [queries, texts]."""
    order = similarities.argsort(dim=1, descending=True, stable=True)
    found = relevant.gather(1, order).float()
    count = relevant.sum(1)
    ranks = torch.arange(1, found.shape[1] + 1, device=found.device)
    figures = {"mrr": 1 / (found.argmax(1) + 1)}
    for cut in CUTS:
        among = found[:, :cut].sum(1)
        figures[f"{RECALL}{cut}"] = (among > 0).float() if one else among / count
    gains = 1 / (ranks[:10] + 1).log2()
    ideal = gains.cumsum(0)[count.clamp(max=len(gains)) - 1]
    return {**figures, "ndcg_at_10": (found[:, :10] * gains).sum(1) / ideal}


def _joined(parts: Any) -> Tensor:
    """A state that torchmetrics has joined over processes, or a list of its parts."""
    return parts if isinstance(parts, Tensor) else torch.cat(parts)
