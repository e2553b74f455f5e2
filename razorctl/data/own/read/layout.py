"""Finds the tables in a folder: saved by `datasets`, named by a card, or named like splits."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from razorctl.data.own.raw import NOT_UTF8
from razorctl.data.own.read import lines
from razorctl.data.own.read.folder import Folder, folders_in
from razorctl.data.own.request import role, role_in, split_of
from razorctl.errors import DataError, UsageError, first_line, lacks_memory
from razorctl.system import documents
from razorctl.system.folders import shown, spelled

METADATA = "metadata"  # as the hub's sets of images call it
SUFFIXES = (*lines.READERS, ".parquet", ".arrow")
INSIDE = ("data", "default")  # folders of tables in repositories of the hub
CARD = "README.md"
PART = re.compile(r"-\d+-of-\d+$")  # ends the name of one of several files of a split
SplitFiles = dict[str, list[Path]]  # name of a split -> its tables


def is_table(file: Path, tagged: bool = False) -> bool:
    """Whether a file is a table; tagged: whether all text files count as tokens with tags."""
    kinds = (*SUFFIXES, *lines.UNSAID) if tagged else SUFFIXES
    named = file.suffix.casefold() in kinds and os.path.isfile(file)  # noqa: PTH113
    return named or lines.of_tokens(file) is not None


def in_folder(folder: Path, tagged: bool = False) -> SplitFiles:
    """Name of a split -> its tables in a folder; empty if there are none.

    They are the files that `datasets` saved, or that the card of a repository names, or whose name
    or folder is a split's. Otherwise it is the only table, or the tables in the only folder if
    INSIDE has its name. Raises UsageError for a card of several configs. tagged: as in `is_table`.
    """
    folders = folders_in(folder)
    tables = _saved(folder) or _on_card(folder) or _called(folder, folders, tagged)
    if not tables and len(folders) == 1 and folders[0].name in INSIDE:
        return in_folder(folders[0], tagged)
    return tables


def _saved(folder: Path) -> SplitFiles:
    """The files of `save_to_disk`, without cache files beside them."""
    names = documents.read_cached(folder / "dataset_dict.json", dict[str, list[str]]) or {}
    parts = {name: folder / name for name in names.get("splits", ())}
    tables: SplitFiles = {}
    for name, part in (parts or {"train": folder}).items():
        state = documents.read_cached(part / "state.json", dict[str, Any]) or {}
        if files := state.get("_data_files"):
            tables[name] = [part / file["filename"] for file in files]
    return tables


def _on_card(folder: Path) -> SplitFiles:
    """The files that the card of a repository names, and files of other splits beside them."""
    configs = _configs(folder / CARD)
    default = [c for c in configs if c.get("default") or c.get("config_name") == "default"]
    if len(configs) > 1 and not default:
        names = ", ".join(str(config.get("config_name")) for config in configs)
        raise UsageError(
            f"{folder} has several configs, {names}, by its {CARD}; name files of one."
        )
    if not configs:
        return {}
    from datasets.data_files import sanitize_patterns

    tables: SplitFiles = {}
    for split, patterns in sanitize_patterns((default or configs)[0]["data_files"]).items():
        files = {file for pattern in patterns for file in folder.glob(str(pattern))}
        tables[str(split)] = sorted(filter(is_table, files))
    every = {file for files in tables.values() for file in files}
    around = {file.parent for file in every}
    beside = _called(around.pop(), []) if len(around) == 1 else {}
    named = {None, *map(role, tables)}
    for split, files_beside in beside.items():
        if role(split) not in named and every.isdisjoint(files_beside):
            tables[split] = files_beside
    return {split: files for split, files in tables.items() if files}


def _configs(card: Path) -> list[Any]:
    """The configs in the header of a card that name files."""
    if not card.is_file():
        return []
    from huggingface_hub import metadata_load

    try:
        header = metadata_load(card) or {}
    except Exception as error:  # of yaml
        if lacks_memory(error):
            raise
        reason = first_line(error)
        raise DataError(f"the header of {card} cannot be read ({reason}); correct it.") from None
    configs = header.get("configs")
    return [c for c in configs if c.get("data_files")] if isinstance(configs, list) else []


def _called(folder: Path, folders: list[Path], tagged: bool = False) -> SplitFiles:
    """The tables whose names or folders are names of splits, or the only table.

    A list of images has the name METADATA. It lies beside them, in the folder or in a split's. An
    only table counts if there is at most one folder, since several may be classes.
    """
    splits: SplitFiles = {}
    tables = _tables(folder, alone=not folders, tagged=tagged)
    for file in tables:
        if spelled(file.name) != file.name:
            raise DataError(f"{folder / spelled(file.name)}: {NOT_UTF8}.")
        splits.setdefault(PART.sub("", split_of(file)), []).append(file)
    if any(map(role, splits)):
        return splits
    of = _in_parts(folders, role) or _in_parts(folders, role_in)
    if of:
        return of
    only = _lists(folder)
    if len(only) == 1 or len(folders) > 1:
        return {"train": only} if len(only) == 1 else {}
    several = len(splits) > 1 and (folders or Folder.walked(folder).images)
    return {} if several and "train" not in map(role_in, splits) else splits


def _in_parts(folders: list[Path], of: Callable[[str], str | None]) -> SplitFiles:
    """The tables in folders of splits, if one is for training; of: name -> its split.

    These are the list of images of a split, or all tables in a folder without folders and images.
    """
    tables = {}
    for part in folders:
        if of(part.name):
            plain = not folders_in(part) and not Folder.walked(part).images
            tables[part.name] = _lists(part) or (_tables(part, alone=True) if plain else [])
    tables = {name: files for name, files in tables.items() if files}
    return tables if "train" in map(of, tables) else {}


def _tables(folder: Path, alone: bool, tagged: bool = False) -> list[Path]:
    """The tables in a folder, not in folders there; alone: whether there are no such folders.

    A JSON file beside other tables, or beside folders of images, describes these.
    """
    here = (file for file in sorted(folder.iterdir()) if shown(file.name))
    files = [file for file in here if _may_be_table(file) and is_table(file, tagged)]
    tables = [file for file in files if file.suffix.casefold() != ".json"]
    return tables or [file for file in files if alone and lines.has_json_rows(file)]


def _may_be_table(file: Path) -> bool:
    """Whether a file has an ending of tables, or the name of a split: then it may have tokens."""
    return file.suffix.casefold() in SUFFIXES or role(split_of(file)) is not None


def _lists(folder: Path) -> list[Path]:
    """The lists of images in a folder."""
    files = (folder / f"{METADATA}{ending}" for ending in (".csv", ".jsonl", ".parquet"))
    return [*filter(is_table, files)]
