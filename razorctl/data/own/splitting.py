"""The splits of checked rows; some training rows are held out where there is no validation."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from razorctl.data.catalog import place
from razorctl.data.own import contents, images, masks, rows
from razorctl.data.own.ask import KNOWN, Ask
from razorctl.data.own.images import Said
from razorctl.data.own.labels import Numbers, numbered
from razorctl.data.own.raw import COLUMNS, Faults, Raw, refuse
from razorctl.data.source import Splits
from razorctl.errors import DataError
from razorctl.models import Progress
from razorctl.models.images import white
from razorctl.models.masks import IGNORED
from razorctl.tasks import LANGUAGE

if TYPE_CHECKING:
    import numpy as np

MOST = 1000  # classes of masks without names; more are no classes but numbers of objects, say


def held_out_count(rows: int, share: float) -> int:
    """How many of so many rows are held out, unless classes have too few."""
    return max(round(share * rows), int(share > 0))


def stratified(labels: "np.ndarray[Any, Any]", share: float, seed: int) -> "np.ndarray[Any, Any]":
    """The positions of `share` of the labels [n], ascending: the same share of each class.

    Largest remainders make up the whole; of equal ones the seed chooses. Each class keeps a label.
    """
    import numpy as np

    draw = np.random.RandomState(seed)  # of the generators the one whose draws never change
    counts = np.bincount(labels)
    quota = share * counts
    most = np.maximum(counts - 1, 0)
    taken = np.minimum(quota.astype(int), most)
    left = held_out_count(len(labels), share) - taken.sum()
    for number in np.lexsort((draw.rand(len(counts)), taken - quota)):
        if left > 0 and taken[number] < most[number]:
            taken[number] += 1
            left -= 1
    shuffled = draw.permutation(len(labels))
    grouped = shuffled[np.argsort(labels[shuffled], kind="stable")]
    starts = np.cumsum(counts) - counts
    ranges = [grouped[start : start + n] for start, n in zip(starts, taken, strict=True)]
    return np.sort(np.concatenate(ranges))


def chosen(
    raw: Raw,
    split: str,
    kept: "np.ndarray[Any, Any]",
    **columns: "np.ndarray[Any, Any]",
) -> Any:
    """The rows with the numbers in `kept`, as `Splits` has them; columns: more of them, of all."""
    from datasets import Image

    found = raw.splits[split]
    found = found.select_columns([name for name in COLUMNS if name in found.column_names])
    # Before rows are left out: they are copied when a column is added after that.
    for name, values in columns.items():
        found = found.add_column(name, values)
    for name in {"image", "mask"} & {*found.column_names}:
        found = found.cast_column(name, Image())
    return found if len(kept) == len(found) else found.select(kept)


@dataclass(frozen=True)
class Looked:
    """What is bad of some rows, and what else was seen of their images and masks.

    skipped: a line for each row that is left out. images, masks: as of `images.looked` and
    `masks.looked`; empty if there are none.
    """

    faults: Faults
    skipped: tuple[str, ...]
    images: Said
    masks: Said

    @property
    def white(self) -> int | None:
        """The level of white in the training rows, or else in others; None if no image needs it."""
        tops = [images.highest(self.images[split]) for split in KNOWN if split in self.images]
        return next((white(top) for top in tops if top is not None), None)

    def contents(self, split: str, rows: Any) -> "np.ndarray[Any, Any]":
        """The content of each row of a split, without its mask; 0 of bad images."""
        import numpy as np

        if split not in self.images:
            return contents.of_rows(rows)
        found = np.zeros(len(rows), np.int64)
        for row, (_, content, _) in self.images[split].items():
            found[row] = content
        return found


@dataclass(frozen=True)
class Checked:
    """Rows with numbered labels, and what is wrong with them as far as it is known."""

    ask: Ask
    raw: Raw
    classes: tuple[str, ...]
    numbers: Numbers
    faults: Faults

    def hold_out(self, kept: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
        """The training rows to hold out, of those in `kept`; raises DataError if none can be."""
        part = self.ask.share(self.raw.splits)
        if self.raw.cut:
            return kept[-1:]
        positions = stratified(self.numbers["train"][kept], part, self.ask.seed)
        if part and not len(positions):
            one = "row of each class" if self.raw.task == "classification" else "row"
            raise DataError(
                f"{self.raw.name} has one {one}, so none can be held out; add rows, or a "
                "validation split."
            )
        chosen_rows: np.ndarray[Any, Any] = kept[positions]
        return chosen_rows

    def counts(self) -> dict[str, int]:
        """The rows of each split, and of what is held out, as far as they are known to be good."""
        kept = rows.good(self.numbers, self.faults)
        rows.check_enough(self.raw, self.classes, self.numbers, kept)
        counts = {split: len(kept[split]) for split in kept}
        counts["held out"] = len(self.hold_out(kept["train"]))
        counts["train"] -= counts["held out"]
        return counts

    def looked(self, progress: Progress) -> Looked:
        """The images and masks of all rows as they are now; raises DataError if one is bad."""
        found = {split: dict(bad) for split, bad in self.faults.items()}
        of_images: Said = {}
        of_masks: Said = {}
        if self.raw.modality == "image":
            of_images = images.looked(self.raw, self.faults, progress)
            for split, bad in images.faults(of_images).items():
                found[split] = dict(sorted({**found[split], **bad}.items()))
        if self.raw.task == "segmentation":
            of_masks = masks.looked(self.raw, self.faults, progress)
            for split, bad in masks.faults(of_masks, len(self.classes)).items():
                found[split] = dict(sorted({**bad, **found[split]}.items()))
        named = [*self.raw.nowhere, *self.raw.named(found)]
        skipped = refuse(self.raw.name, named, self.ask.skip_bad)
        return Looked(found, skipped, of_images, of_masks)

    def load(self, progress: Progress = lambda _: None) -> Splits:
        """The splits; raises DataError for bad rows, and for good ones that are not enough."""
        import numpy as np

        looked = self.looked(progress)
        kept = rows.good(self.numbers, looked.faults)
        rows.check_enough(self.raw, self.classes, self.numbers, kept)
        held_out = self.hold_out(kept["train"])
        parts = {split: (split, numbers) for split, numbers in kept.items()}
        if len(held_out):
            parts["train"] = "train", np.setdiff1d(kept["train"], held_out)
            parts["validation"] = "train", held_out
        held = {split: looked.contents(split, of) for split, of in self.raw.splits.items()}
        made = {part: self._rows(*of, looked.white) for part, of in parts.items()}
        used = bool(len(held_out) or looked.skipped)
        return Splits(
            made["train"],
            made.get("validation"),
            made.get("test"),
            self.classes,
            looked.skipped,
            self._record(held_out, looked.faults) if used else None,
            {part: self._digest(*of, held, looked) for part, of in parts.items()},
            looked.white,
            rows.notes(self.raw, self.classes, self.numbers, parts, held),
        )

    def _rows(self, split: str, kept: "np.ndarray[Any, Any]", white: int | None) -> Any:
        import numpy as np

        columns = {"label": self.numbers[split]} if self.raw.task == "classification" else {}
        if white is not None:
            columns["white"] = np.full(len(self.numbers[split]), white)
        return chosen(self.raw, split, kept, **columns)

    def _digest(
        self, split: str, kept: "np.ndarray[Any, Any]", held: Numbers, looked: Looked
    ) -> str:
        """That of some rows, by the contents that rows have, and those of masks."""
        labels = self.numbers[split][kept]  # all 0 of other tasks
        if split in looked.masks:
            labels = [looked.masks[split][row][2] for row in kept]
        return contents.digest(held[split][kept], labels)

    def _record(self, held_out: "np.ndarray[Any, Any]", found: Faults) -> dict[str, Any]:
        """What the run directory says of the rows, which are counted from 0 as they are stored."""
        return {
            "dataset": place(self.raw.name),
            "split": self.raw.names["train"],
            "validation": self.ask.share(self.raw.splits),
            "seed": self.ask.seed,
            "rows": held_out.tolist(),
            "skipped": {self.raw.names[split]: list(bad) for split, bad in found.items() if bad},
        }


def checked(ask: Ask, raw: Raw) -> Checked:
    """The rows with all that is wrong with them; refuses them at once if that is known by now."""
    for split, own in raw.names.items():
        if not len(raw.splits[split]):
            raise DataError(f"{own} of {raw.name} has no rows; add some, or name other splits.")
    if raw.task in LANGUAGE:
        raw = _divided(ask, raw)
    elif raw.task == "segmentation":
        raw = _named(raw)
    classes, numbers = numbered(raw)
    found = Checked(ask, raw, classes, numbers, rows.faults(raw, numbers))
    if not ask.skip_bad and (any(found.faults.values()) or raw.nowhere):
        found.looked(lambda _: None)
    return found


def _divided(ask: Ask, raw: Raw) -> Raw:
    """The rows with a single training text as two, if its end is to be held out.

    It is cut at a line break, or else at a space. Raises DataError if it has none.
    """
    import pyarrow as pa
    from datasets import Dataset

    train = raw.splits["train"]
    part = ask.share(raw.splits)
    if "text" not in train.column_names or len(train) != 1 or not part:
        return raw
    text = train[0]["text"] or ""
    at = _cut(text, part)
    if at is None:
        if not text.strip():
            return raw  # which is bad
        raise DataError(
            f"{raw.name} has one text without a line break, so none of it can be held out; add "
            "texts, or a validation split."
        )
    places = [raw.place("train", 0), f"the end of {raw.place('train', 0)}"]
    kind = pa.large_string()
    table = pa.table({"text": pa.array([text[:at], text[at:].lstrip()], kind), "place": places})
    return replace(raw, splits={**raw.splits, "train": Dataset(table)}, cut=True)


def _cut(text: str, share: float) -> int | None:
    """Where the end begins that is nearest to a share of a text; None if it cannot be cut."""
    middle = min(max(round(len(text) * (1 - share)), 1), len(text))
    for mark in ("\n", " "):
        found = [text.rfind(mark, 0, middle), text.find(mark, middle)]
        cuts = [at for at in found if at > 0 and text[:at].strip() and text[at:].strip()]
        if cuts:
            return min(cuts, key=lambda at: abs(at - middle))
    return None


def _named(raw: Raw) -> Raw:
    """The rows with names of their classes, which are the values of the training masks if unnamed.

    Reads these masks, but not again if `Checked.looked` follows. Raises DataError if they have no
    classes.
    """
    if raw.class_names is not None:
        return raw
    known = rows.faults(raw, numbered(raw)[1])
    said = masks.looked(raw, known)
    tops = [top for fault, top, _ in said["train"].values() if not fault]
    if not tops:
        bad = masks.faults(said, MOST)
        every = {split: {**known[split], **bad[split]} for split in bad}
        refuse(raw.name, [*raw.named(every)], skip_bad=False)
    highest = max(tops)
    if not 1 <= highest < MOST:
        has = "no class but 0" if highest < 1 else f"values up to {highest:,}"
        raise DataError(
            f"the masks of {raw.name} have {has}, besides {IGNORED} for pixels to ignore; "
            "write the classes as 0, 1, 2 and so on."
        )
    return replace(raw, class_names=tuple(map(str, range(highest + 1))))


def digested(splits: Splits) -> Splits:
    """The splits with their digests, as far as these are not known, and no streams."""
    from datasets import Dataset

    parts = {"train": splits.train, "validation": splits.validation, "test": splits.test}
    there: dict[str, Any] = {split: rows for split, rows in parts.items() if rows is not None}
    if splits.digests is not None or not all(isinstance(rows, Dataset) for rows in there.values()):
        return splits
    found: Any = {
        split: (contents.of_rows(rows), rows["label"][:] if "label" in rows.column_names else ())
        for split, rows in there.items()
    }
    return replace(splits, digests={split: contents.digest(*of) for split, of in found.items()})
