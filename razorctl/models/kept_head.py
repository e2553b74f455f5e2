"""The head of a pretrained model: rows whose classes have the same names are reused."""

import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from razorctl import units
from razorctl.system import documents

if TYPE_CHECKING:
    from torch import Tensor, nn

log = logging.getLogger("razorctl.models")

UNNAMED = re.compile(r"LABEL_\d+|\d+")  # placeholder names of classes
# Prefixes of the weights of heads in timm and transformers.
HEADS: tuple[str, ...] = ("classifier.", "score.", "classification_head.", "head.", "fc.")
HEADS += ("decode_head.classifier.", "auxiliary_head.classifier.")
# Parts of these names in detection models. Some have a last row, of no object.
OF_OBJECTS = ("class_embed.", "class_labels_classifier.", "enc_score_head.")
SHOWN = 5  # classes that a message names
DEVIATION = 0.02  # of the weights of new rows


@dataclass(frozen=True)
class KeptHead:
    """The names of the classes of a stored head, and its weights.

    These have one row each, and the heads of detection models may have one more, of no object.
    """

    names: tuple[str, ...]
    weights: Mapping[str, "Tensor"]

    def rows(self, classes: Sequence[str]) -> list[int | None]:
        """For each class, the row of the stored class with the same name, else None.

        A name in other case counts if only one stored name is spelled so. If all stored names are
        placeholders, the order counts.
        """
        unnamed = all(map(UNNAMED.fullmatch, self.names)) and not {*self.names} & {*classes}
        if unnamed and len(self.names) == len(classes):
            return [*range(len(classes))]
        exact = {name: number for number, name in enumerate(self.names)}
        spelled = Counter(map(str.casefold, self.names))
        alike = {n.casefold(): number for n, number in exact.items() if spelled[n.casefold()] == 1}
        return [exact.get(name, alike.get(name.casefold())) for name in classes]

    def put(self, model: "nn.Module", classes: Sequence[str], what: str) -> None:
        """Copies the stored rows into the head of a model, and initializes the other rows.

        what: the name of the model, for the log.
        """
        import torch

        rows, state = self.rows(classes), model.state_dict()
        pairs = zip(classes, rows, strict=True)
        kept = {name: self.names[row] for name, row in pairs if row is not None}
        placed = False
        with torch.no_grad():
            for name, stored in self.weights.items():
                weight, more = state.get(name), len(stored) - len(self.names)
                if weight is None or weight.shape != (len(rows) + more, *stored.shape[1:]):
                    continue
                new = torch.zeros_like(weight)
                if stored.dim() > 1 and None in rows:
                    new.normal_(0, DEVIATION)
                elif _of_objects(name):  # a bias says that most queries find nothing
                    new.fill_(float(stored[: len(self.names)].mean()))
                for number, row in enumerate([*rows, *range(len(self.names), len(stored))]):
                    if row is not None:
                        new[number] = stored[row]
                weight.copy_(new)
                placed = True
        if not (placed and kept):
            log.warning("the classifier of %s is new; it is trained from random weights", what)
            return
        others = [name for name in classes if name not in kept]
        new_rows = f"; the rows of {_listed(others)} are new" if others else ""
        said = [a if a == b or not UNNAMED.fullmatch(b) else f"{a} ({b})" for a, b in kept.items()]
        log.warning("the classifier of %s keeps the rows of %s%s", what, _listed(said), new_rows)


def _of_objects(name: str) -> bool:
    return any(part in name for part in OF_OBJECTS)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= SHOWN else units.count(len(names), "class")


def read(files: Sequence[Path]) -> KeptHead | None:
    """The head in the files of a pretrained model; None if it has none, or no classes."""
    from safetensors import safe_open

    config = next((file for file in files if file.name == "config.json"), None)
    names = () if config is None else _names(documents.read_foreign(config))
    weights = dict[str, Any]()
    for file in files:
        if file.suffix == ".safetensors":
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118, as it is no mapping
                    shape = opened.get_slice(name).get_shape()
                    classes = name.startswith(HEADS) and shape[:1] == [len(names)]
                    counts = [len(names)], [len(names) + 1]
                    if classes or (_of_objects(name) and shape[:1] in counts):
                        weights[name] = opened.get_tensor(name)
    return KeptHead(names, weights) if weights else None


def _names(config: Any) -> tuple[str, ...]:
    """The names of the classes in a config of timm or transformers, in order."""
    if not isinstance(config, dict):
        return ()
    named, listed = config.get("id2label"), config.get("label_names")
    if isinstance(named, dict) and all(str(number) in named for number in range(len(named))):
        listed = [named[str(number)] for number in range(len(named))]
    elif "model_type" in config:
        listed = ["LABEL_0", "LABEL_1"]  # transformers' default, which it does not write
    return tuple(map(str, listed)) if isinstance(listed, list) else ()
