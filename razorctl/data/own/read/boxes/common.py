"""What the readers of boxes share: their rows, and the images and splits of a folder."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from razorctl.data.own import objects, rows
from razorctl.data.own.raw import RawRows, not_utf8
from razorctl.data.own.read.column import SUFFIXES
from razorctl.data.own.read.folder import Folder
from razorctl.data.own.request import DataRequest, role_in
from razorctl.data.own.store import batches_of
from razorctl.errors import DataError, raise_lack
from razorctl.system import documents
from razorctl.system.folders import spelled

if TYPE_CHECKING:
    from datasets import Dataset


def row(
    image: Path | None, place: str, found: Sequence[Any], fault: str | None, size: Any = None
) -> dict[str, Any]:
    """A row of `RawRows`; size: [width, height] in the file, or None."""
    fault = fault or not_utf8(place)
    return {
        "image": None if image is None else spelled(str(image)),
        "objects": found,
        "size": size if size and max(size) <= objects.LARGEST else None,
        "place": spelled(place),
        "fault": fault,
    }


def table(every: Iterable[Mapping[str, Any]]) -> "Dataset":
    """Rows of `row` in memory."""
    import datasets
    import pyarrow as pa

    text = pa.string()
    parts = {"image": text, "objects": objects.kind(), "size": pa.list_(pa.int64())}
    schema = pa.schema([*parts.items(), ("place", text), ("fault", text)])
    return datasets.Dataset(pa.Table.from_batches(batches_of(every, schema), schema))


def raw_rows(
    request: DataRequest,
    folder: Folder,
    splits: dict[str, "Dataset"],
    names: dict[str, str],
    details: str,
    **more: Any,
) -> RawRows:
    """The rows of splits in a folder; splits without any box are left out.

    names: split -> its name in the data. more: fields of `RawRows`. Raises DataError if two classes
    have one name.
    """
    classes = more.get("class_names") or ()
    if twice := [name for name in classes if classes.count(name) > 1]:
        raise DataError(f"{request.name} has two classes called {twice[0]}; rename one.")
    details += rows.unlabeled_out(request, splits, names)
    more = {"root": folder.top.absolute(), "task": "detection", "sorted": True, **more}
    return RawRows(request.name, splits, names, details, **more)


def sign(folder: Folder, file: Path) -> str:
    """The file of a data set, or the folder of many such, as it is named in a sentence."""
    many = file.suffix.casefold() in (".txt", ".xml")
    return spelled(str((file.parent if many else file).relative_to(folder.top)))


def by_split(folder: Folder, files: Iterable[Path]) -> dict[str, list[Path]]:
    """Name of a split -> its files: by the first folder in their path that is called like one.

    Without such folders all are of one split, which has the name of the folder.
    """
    parts: dict[str, list[Path]] = {}
    for file in files:
        above = file.relative_to(folder.top).parts[:-1]
        name = next((part for part in above if role_in(part)), "")
        parts.setdefault(name, []).append(file)
    if len(parts) > 1:
        parts.pop("", None)
    return {name or folder.top.resolve().name: of for name, of in parts.items()}


def images_in(folder: Folder) -> dict[Path, dict[str, Path]]:
    """Each folder in a folder -> the names of its images -> their paths."""
    return {
        here: {
            name: here / name for name in sorted(names) if Path(name).suffix.casefold() in SUFFIXES
        }
        for here, (_, names) in folder.inside.items()
    }


def text_of(file: Path) -> str:
    """The text of a file in UTF-8; raises DataError if it cannot be read."""
    try:
        return documents.read_bytes(file).decode("utf-8-sig")
    except OSError as error:
        raise_lack(error)
        raise DataError(f"{file} cannot be read ({error.strerror}); correct that.") from None
    except UnicodeDecodeError:
        raise DataError(f"{file} is not UTF-8; save it as UTF-8.") from None
