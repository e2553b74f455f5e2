"""The head of a pretrained model whose classes have names: its rows go by them."""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from razorctl import documents, units

if TYPE_CHECKING:
    from torch import Tensor, nn

log = logging.getLogger("razorctl.models")

UNNAMED = re.compile(r"LABEL_\d+|\d+")  # names of classes that say nothing
# First words of the names of weights of heads, beside what `get_classifier` of timm names.
HEADS = (
    *("classifier.", "score.", "classification_head.", "head.", "fc."),
    *("decode_head.classifier.", "auxiliary_head.classifier."),
)
NAMED = 5  # classes that a line names
DEVIATION = 0.02  # of the weights of new rows


@dataclass(frozen=True)
class KeptHead:
    """The names of the classes of a stored head, and its weights, one row each."""

    names: tuple[str, ...]
    weights: Mapping[str, "Tensor"]

    def rows(self, classes: Sequence[str]) -> list[int | None]:
        """For each class the row of the class of that name, in any case; None if there is none."""
        numbers = {name.casefold(): number for number, name in enumerate(self.names)}
        return [numbers.get(name.casefold()) for name in classes]

    def put(self, model: "nn.Module", classes: Sequence[str], what: str) -> None:
        """Gives the head of a model the stored rows of its classes, and new ones to the others.

        what: the name of the model, for a line of the log.
        """
        import torch

        rows, own = self.rows(classes), model.state_dict()
        with torch.no_grad():
            for name, stored in self.weights.items():
                weight = own.get(name)
                if weight is None or weight.shape != (len(rows), *stored.shape[1:]):
                    continue
                new = torch.zeros_like(weight)
                if stored.dim() > 1 and None in rows:
                    new.normal_(0, DEVIATION)
                for number, row in enumerate(rows):
                    if row is not None:
                        new[number] = stored[row]
                weight.copy_(new)
        new_names = [name for name, row in zip(classes, rows, strict=True) if row is None]
        if len(new_names) == len(classes):
            log.warning("the classifier of %s is new; it is trained from random weights", what)
        elif new_names:
            known = [name for name in classes if name not in new_names]
            log.warning(
                "the classifier of %s keeps the rows of %s; those of %s are new",
                *(what, _listed(known), _listed(new_names)),
            )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= NAMED else units.count(len(names), "class")


def read(files: Sequence[Path]) -> KeptHead | None:
    """The head in the files of a pretrained model; None if it has none whose classes have names."""
    from safetensors import safe_open

    config = next((file for file in files if file.name == "config.json"), None)
    names = () if config is None else _names(documents.read_foreign(config))
    if not names or all(map(UNNAMED.fullmatch, names)):
        return None
    found = dict[str, Any]()
    for file in files:
        if file.suffix == ".safetensors":
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118, as it is no mapping
                    shape = opened.get_slice(name).get_shape()
                    if name.startswith(HEADS) and shape[:1] == [len(names)]:
                        found[name] = opened.get_tensor(name)
    return KeptHead(names, found) if found else None


def _names(config: Any) -> tuple[str, ...]:
    """The names of the classes by a config of timm or transformers, in their order."""
    if not isinstance(config, dict):
        return ()
    named, listed = config.get("id2label"), config.get("label_names")
    if isinstance(named, dict) and all(str(number) in named for number in range(len(named))):
        listed = [named[str(number)] for number in range(len(named))]
    return tuple(map(str, listed)) if isinstance(listed, list) else ()
