"""Figures of retrieval, against torchmetrics' over the whole matrix."""

import pytest
import torch
import torch.nn.functional as F
from torchmetrics import retrieval as kinds

from razorctl.ops.contrastive import Similarity
from razorctl.training import retrieval
from razorctl.training.retrieval import Retrieval


@pytest.mark.parametrize("part", [retrieval.PART, 40])
def test_figures_are_those_of_torchmetrics(part, monkeypatch):
    monkeypatch.setattr(retrieval, "PART", part)
    ids = torch.arange(1, 91).view(30, 3)
    ids[7, 0] = ids[2, 0]  # finds two texts
    ids[9, 1] = ids[3, 1]  # found by two
    ids[11, 2] = ids[4, 1]  # a negative of one row is to be found by another
    table = F.normalize(torch.randn(91, 6), dim=-1)
    metric = Retrieval(Similarity(20, symmetric=True))
    for rows in ids.split(13):
        metric.update(table[rows], rows)
    figures = metric.compute()
    queries, texts = ids[:, 0].unique(), ids[:, 1:].unique()
    relevant = {(int(row[0]), int(row[1])) for row in ids}
    target = torch.tensor([[(int(q), int(t)) in relevant for t in texts] for q in queries])
    flat = {
        # Above 0, since torchmetrics takes others for not found.
        "preds": 2 + (table[queries] @ table[texts].T).flatten(),
        "target": target.flatten(),
        "indexes": torch.arange(len(queries)).repeat_interleave(len(texts)),
    }
    wanted = {
        "mrr": kinds.RetrievalMRR(),
        "ndcg_at_10": kinds.RetrievalNormalizedDCG(top_k=10),
        **{f"recall_at_{cut}": kinds.RetrievalRecall(top_k=cut) for cut in (1, 5, 10)},
    }
    for name, kind in wanted.items():
        torch.testing.assert_close(figures[name], kind(**flat), msg=name)
    assert figures.keys() == {*wanted, "loss"}


def test_images_and_texts_find_each_other():
    """Figures are means of both directions, in which an image may have several texts."""
    ids = torch.arange(1, 41).view(20, 2)
    ids[7, 0], ids[9, 1] = ids[2, 0], ids[3, 1]
    table = F.normalize(torch.randn(41, 6), dim=-1)
    found = []
    for rows, kinds_of in ((ids, ("image_to_text", "text_to_image")), (ids, ()), (ids.flip(1), ())):
        metric = Retrieval(Similarity(20, None, True, kinds_of))
        metric.update(table[rows], rows)
        found.append(metric.compute())
    both, forward, back = found
    for name in ("mrr", "ndcg_at_10"):
        torch.testing.assert_close(both[name], (forward[name] + back[name]) / 2)
    assert forward["mrr"] != back["mrr"]
    for direction, rows in (("image_to_text", ids), ("text_to_image", ids.flip(1))):
        order = (table[rows[:, 0]] @ table[rows[:, 1]].T).argsort(dim=1, descending=True)
        for cut in (1, 5, 10):
            hits = {}  # of each query, as equal ones count once; an answer may be there twice
            for row, found_rows in zip(rows, order, strict=True):
                texts = list(dict.fromkeys(rows[found_rows, 1].tolist()))[:cut]
                answers = rows[rows[:, 0] == row[0], 1].tolist()
                hits[int(row[0])] = bool({*answers} & {*texts})
            share = sum(hits.values()) / len(hits)
            assert both[f"{direction}_recall_at_{cut}"] == pytest.approx(share)
