"""Rows as a trained model takes them: nothing is held out, and labels are its classes' or none."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from razorctl.data import Progress, own
from razorctl.data.own import columns, folder, images, rows, tables, texts
from razorctl.data.own.ask import Ask, role
from razorctl.data.own.labels import numbered
from razorctl.data.own.raw import NOT_UTF8, Raw, content, refusal, refuse
from razorctl.data.own.splitting import Checked, chosen
from razorctl.errors import DataError, UsageError
from razorctl.folders import exists, spelled
from razorctl.job import Job
from razorctl.models import Modality
from razorctl.models.images import white as level

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset

STDIN = "-"
KINDS = ", ".join(suffix.removeprefix(".").upper() for suffix in tables.SUFFIXES)


def labeled(
    job: Job,
    modality: Modality,
    classes: Sequence[str],
    progress: Progress = lambda _: None,
    white: int | None = None,
    trained: Job | None = None,
) -> tuple["Dataset", str | None, tuple[str, ...]]:
    """All rows of the test split of a job's data, or else of the validation split, or else all.

    job: with `split`, the one to take. modality: what the model takes. classes: the names that the
    numbers of the labels are of. white: the level of white in the images that the model was trained
    on; None is that of these. trained: the job whose columns are used where a table has them and
    none is given.
    Returns the rows, the split's name in the data, which is None if there are none, and a line for
    each bad row that is left out. Raises DataError for labels without a class too.
    """
    ask = Ask.of(replace(job, task="classification"), trained)
    raw = own.read(ask)
    if raw.modality != modality:
        raise UsageError(
            f"{job.model} takes {modality}s, and {raw.name} has {raw.modality}s; name other data, "
            f"or its {modality}s with --{modality}-column."
        )
    split = next(split for split in ("test", "validation", "train") if split in raw.splits)
    called = raw.names[split] if len(raw.splits) > 1 or job.split else None
    if not len(raw.splits[split]):
        raise rows.empty(raw.name, raw.names[split])
    raw = replace(raw, splits={split: raw.splits[split]}, names={split: raw.names[split]})
    known, numbers = numbered(raw)
    known_bad = rows.faults(raw, numbers)
    kept = rows.good(numbers, known_bad)[split]
    renumbered(raw.name, numbers[split][kept], known, classes)  # before images are read
    looked = Checked(ask, raw, tuple(classes), numbers, known_bad).looked(progress)
    kept = rows.good(numbers, looked.faults)[split]
    if not len(kept):
        raise DataError(f"{raw.name} has only bad rows; correct some.")
    labels = renumbered(raw.name, numbers[split], known, classes, kept)
    found = whitened(chosen(raw, split, kept, label=labels), white or looked.white)
    return found, called, looked.skipped


def whitened(rows: "Dataset", white: int | None) -> "Dataset":
    """Rows with this level of white, if they are of images and it is not None."""
    import numpy as np

    if white is None or "image" not in rows.column_names:
        return rows
    plain = rows.remove_columns({"white"} & {*rows.column_names})
    return plain.add_column("white", np.full(len(rows), white))


def renumbered(
    name: str,
    labels: "np.ndarray[Any, Any]",
    known: Sequence[str],
    classes: Sequence[str],
    kept: "np.ndarray[Any, Any] | None" = None,
) -> "np.ndarray[Any, Any]":
    """Labels [n], which are numbers in `known`, as numbers in `classes`: of the same names.

    kept: the rows that count; None is all. Raises DataError that names those without a class.
    """
    import numpy as np

    used = np.unique(labels if kept is None else labels[kept])
    unknown = [known[number] for number in used if known[number] not in classes]
    if unknown:
        few = ", ".join(map(repr, unknown[:5])) + (", ..." if len(unknown) > 5 else "")
        own_few = ", ".join(map(repr, classes[:5])) + (", ..." if len(classes) > 5 else "")
        raise DataError(
            f"{name} has labels that are no classes of the run: {few}; its classes are {own_few}, "
            "so correct them, or choose another column with --label-column."
        )
    place = {label: number for number, label in enumerate(classes)}
    table = np.array([*(place.get(label, -1) for label in known), -1])  # -1 is no label
    found: np.ndarray[Any, Any] = table[labels]
    return found


@dataclass(frozen=True)
class Part:
    """Good rows of files: of one table or text file, or of image files; without labels.

    kept: their numbers, counted from 0 as they are stored. white: the level of white in images.
    """

    raw: Raw
    kept: "np.ndarray[Any, Any]"
    of_images: bool
    white: int | None = None

    @property
    def data(self) -> "Dataset":
        """The rows as `Splits` has them, without labels."""
        return whitened(chosen(self.raw, "rows", self.kept), self.white)

    @property
    def places(self) -> Iterator[tuple[str, int | None]]:
        """The file of each row and, in a table or a text file, its number there."""
        if self.of_images:
            files = self.raw.splits["rows"].data.column("image")
            return ((files[row].as_py(), None) for row in self.kept)
        return ((self.raw.name, int(row)) for row in self.kept)

    @property
    def names(self) -> Iterator[Path]:
        """What is made of each image is called so, without an ending: as the image in its folder.

        An image inside a table is called by the table and its row.
        """
        found = self.raw.splits["rows"].data.column("image")
        top = (self.raw.root or Path()).absolute()
        inside = self.raw.splits["rows"].data.column("name") if self.of_images else None
        for row in self.kept:
            image = content(found[row].as_py())
            if inside is not None:
                yield Path(inside[row].as_py()).with_suffix("")
            elif isinstance(image, str) and Path(image).is_relative_to(top):
                yield Path(image).relative_to(top).with_suffix("")
            else:
                yield Path(f"{Path(self.raw.name).stem}-{row}")


def unlabeled(
    files: Sequence[str],
    job: Job,
    modality: Modality,
    stdin: Iterable[str] = (),
    progress: Progress = lambda _: None,
    white: int | None = None,
    trained: Job | None = None,
) -> tuple[list[Part], tuple[str, ...]]:
    """What files hold for a model of that modality, and a line for each bad row that is left out.

    files: tables and folders of them; for images also images and folders of them; for texts also
    files of texts, whose empty lines do not count, and folders of those. STDIN stands for the lines
    in `stdin`, which are texts or the paths of images. white, trained: as of `labeled`.
    Raises UsageError for what does not exist or is of another kind, and DataError for bad rows that
    the job does not skip.
    """
    other = "text" if modality == "image" else "image"
    if getattr(job, f"{other}_column") is not None:
        raise UsageError(f"{job.model} takes {modality}s; leave --{other}-column out.")
    absent = [name for name in files if name != STDIN and not exists(Path(name))]
    if absent:
        verb = "does not exist" if len(absent) == 1 else "do not exist"
        raise UsageError(f"{', '.join(map(spelled, absent))} {verb}; name files that do.")
    import numpy as np

    parts: list[Part] = []
    skipped: list[str] = []
    tops: list[float] = []
    for raw, of_images in _raws(files, Ask.of(job, trained), modality, stdin):
        numbers = {"rows": np.zeros(len(raw.splits["rows"]), np.int64)}
        known = rows.faults(raw, numbers, answered=False)
        empty = _empty_lines(raw)
        known["rows"] = {row: why for row, why in known["rows"].items() if row not in empty}
        if modality == "image":
            said = images.looked(raw, known, progress)
            if (top := images.highest(said["rows"])) is not None:
                tops.append(top)
            more = images.faults(said)
            known = {"rows": dict(sorted({**known["rows"], **more["rows"]}.items()))}
        skipped += refuse(raw.name, [*raw.named(known)], skip_bad=True)
        kept = np.setdiff1d(rows.good(numbers, known)["rows"], sorted(empty))
        parts.append(Part(raw, kept, of_images))
    if skipped and not job.skip_bad:
        name = spelled(files[0]) if len(files) == 1 and files[0] != STDIN else "the list of files"
        raise refusal(name, skipped)
    if white is None and tops:
        white = level(max(tops))
    return [replace(part, white=white) for part in parts], tuple(skipped)


def _empty_lines(raw: Raw) -> set[int]:
    """The lines of a text file that are empty."""
    found = raw.splits["rows"]
    if raw.modality != "text" or "name" not in found.column_names:
        return set()
    return {row for row, text in enumerate(found["text"]) if not text.strip()}


def _raws(
    files: Sequence[str], ask: Ask, modality: Modality, stdin: Iterable[str]
) -> Iterator[tuple[Raw, bool]]:
    """The rows of each table and text file, and of image files that follow each other."""
    every = [file for name in files for file in _inside(name, modality)]
    for is_table, group in groupby(every, key=lambda name: tables.is_table(Path(name))):
        if is_table:
            for name in group:
                yield tables.unlabeled(replace(ask, name=name), Path(name), modality), False
        elif modality == "image":
            pairs = [pair for name in group for pair in _images(name, stdin, ask)]
            paths = [path for path, _ in pairs]
            yield _listed("images", "image", paths, paths, [name for _, name in pairs]), True
        else:
            for name in group:
                lines = list(stdin if name == STDIN else _lines(Path(name)))
                where = "stdin" if name == STDIN else name
                places = [f"{where}, line {number}" for number in range(1, len(lines) + 1)]
                yield _listed(name, "text", lines, places, places), False


def _inside(name: str, modality: Modality) -> list[str]:
    """The tables of splits in a folder, as for training, or else its texts; or the name alone."""
    top = Path(name)
    if name == STDIN or not top.is_dir():
        return [name]
    every: texts.Files = tables.in_folder(top)
    found = {split: files for split, files in every.items() if role(split)}
    if not found and modality == "text":
        found = {**texts.in_folder(top)}
    return [str(file) for files in found.values() for file in files] or [name]


def _images(name: str, stdin: Iterable[str], ask: Ask) -> list[tuple[str, str]]:
    """The path of each image and its name in the folder, or else that of its file.

    Of folders of images and of masks those of images are taken for segmentation.
    """
    top = Path(name)
    if name == STDIN or not top.is_dir():
        return [(path, Path(path).name) for path in (stdin if name == STDIN else [name])]
    parts = folder.layout(top) if ask.task == "segmentation" else None
    folders = {"": top}
    if parts is not None:
        folders = {split if len(parts) > 1 else "": of for split, (of, _) in parts.items()}
    found = [
        (str(file), str(Path(split, file.relative_to(here))))
        for split, here in folders.items()
        for file in folder.files_below(here, set())
    ]
    if not found:
        raise DataError(f"{name} has no images; name another folder.")
    return found


def _lines(file: Path) -> list[str]:
    if file.suffix.casefold() in columns.SUFFIXES:
        raise UsageError(f"{file} is an image, and the model takes texts; name files of texts.")
    if not texts.is_text(file):
        raise UsageError(
            f"{file} is no file of texts; give {KINDS}, or TXT with a text on each line."
        )
    try:
        return file.read_text("utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise DataError(f"{file} is not UTF-8; save it as UTF-8.") from None


def _listed(
    name: str, column: Modality, values: list[str], places: list[str], names: list[str]
) -> Raw:
    import pyarrow as pa
    from datasets import Dataset

    faults = [None if spelled(value) == value else NOT_UTF8 for value in values]
    texts = {column: values, "place": places, "name": names}
    own: dict[str, Any] = {key: [*map(spelled, of)] for key, of in texts.items()}
    own["fault"] = faults
    table = pa.table({key: pa.array(of, pa.string()) for key, of in own.items()})
    return Raw(name, column, {"rows": Dataset(table)}, {"rows": name}, "")
