"""The tasks that models learn, and the metrics of an evaluation of each."""

import re
from typing import Literal, get_args

Task = Literal[
    "classification",
    "regression",
    "multi-label",
    "token-classification",
    "segmentation",
    "detection",
    "causal-lm",
    "masked-lm",
    "embedding",
]
TASKS: tuple[Task, ...] = get_args(Task)
# Tasks with one label per row, for a classifier's head; the first is the usual one.
OF_ROWS: tuple[Task, ...] = ("classification", "regression", "multi-label")
# Tasks whose rows have labels, instead of labels made from the rows.
LABELED: tuple[Task, ...] = (*OF_ROWS, "token-classification")
# Tasks whose rows name classes, by which a finished run is evaluated on other data.
CLASSED: tuple[Task, ...] = (*LABELED, "detection")
LANGUAGE: tuple[Task, ...] = ("causal-lm", "masked-lm")  # tasks that learn from texts alone
# Tag of a token in an entity: its position (begins, inside or in the middle, ends or last, single),
# and the type.
ENTITY_TAG = re.compile(r"([BIMELSU])[-_](.+)")
NO_LABEL = -100  # the label of a token or a pixel that does not count, as in torch
# Task -> its figures; the first one is the default of `Job.metric`.
_OF_TOKENS = ("perplexity", "accuracy", "loss")
FIGURES: dict[Task, tuple[str, ...]] = {
    "classification": (
        *("accuracy", "balanced_accuracy", "f1", "matthews", "top5_accuracy", "loss"),
    ),
    "regression": ("mse", "rmse", "mae", "r2", "pearson", "spearman", "loss"),
    "multi-label": ("mean_average_precision", "f1", "micro_f1", "exact_match", "loss"),
    "token-classification": ("f1", "precision", "recall", "accuracy", "loss"),
    "segmentation": ("mean_iou", "accuracy", "loss"),
    "detection": (
        *("map", "map_50", "map_75", "map_small", "map_medium", "map_large", "mar_100", "loss"),
    ),
    "causal-lm": _OF_TOKENS,
    "masked-lm": _OF_TOKENS,
    "embedding": (
        *("mrr", "recall_at_1", "recall_at_5", "recall_at_10", "ndcg_at_10"),
        *("spearman", "pearson", "loss"),
    ),
}
EVERY_FIGURE = tuple(dict.fromkeys(figure for figures in FIGURES.values() for figure in figures))
# Metrics that are best at their least value.
LEAST = frozenset({"loss", "mse", "rmse", "mae", "perplexity"})
