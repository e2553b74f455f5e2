"""Models by name.

Every module of this package is imported, is for one library, and defines `MODELS`, a tuple of
`ModelEntry`. It imports its library inside functions, so that listing models loads no torch.
"""

import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from razorctl import registry
from razorctl.config.job import Job
from razorctl.errors import DataError, RazorError, UsageError, raise_lack, reason_of
from razorctl.models import weights
from razorctl.models.model import Modality as Modality
from razorctl.models.model import Model as Model
from razorctl.models.model import ModelEntry as ModelEntry
from razorctl.models.model import RenderedChat as RenderedChat
from razorctl.models.rows import Progress as Progress
from razorctl.models.rows import Rows as Rows
from razorctl.system import documents, folders

T = TypeVar("T")

FROM_SCRATCH = (
    "{model} starts from random weights and has no pretrained part: expect to need far more rows "
    "and epochs."
)


@contextmanager
def told_before() -> Iterator[None]:
    """Silences warnings about new parts of models inside the block, as for a resumed run."""
    log = logging.getLogger(__name__)
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


# The other files are shared by the libraries.
_LIBRARIES = [file for file in registry.modules(__name__, __path__) if hasattr(file, "MODELS")]
_MODELS: dict[str, ModelEntry] = {model.name: model for file in _LIBRARIES for model in file.MODELS}
CONFIG = "config.json"  # identifies the model in a folder
# File in a folder without a config -> what the folder has, and how to proceed.
OTHERS = {
    "adapter_config.json": "an adapter of PEFT, not a model; merge it into its model with "
    "merge_and_unload, and name the folder of that",
    "model_index.json": "a pipeline of diffusers, which razorctl cannot train; name a model of "
    "transformers, timm or torchvision",
    "open_clip_config.json": "a model of open_clip, whose tower of texts timm lacks; name one of "
    "transformers, such as openai/clip-vit-base-patch32",
    "*.gguf": "a model in the format of llama.cpp, which cannot be trained; name the model that it "
    "was made from",
}


def models() -> dict[str, ModelEntry]:
    """Every registered name."""
    return _MODELS


def prefixes() -> tuple[str, ...]:
    """The prefixes of the libraries, such as `timm:`."""
    return tuple(library.PREFIX for library in _LIBRARIES)


def named(name: str) -> ModelEntry:
    """The entry of a registered name, a name with a library's prefix, or a folder.

    The prefix may be omitted if a library has a model of that name. Raises UsageError with the
    nearest name if there is none, MissingError if a config cannot be fetched, and DataError if a
    folder has no model.
    """
    if name in _MODELS:
        return _MODELS[name]
    for library in _LIBRARIES:
        if name.startswith(library.PREFIX):
            entry: ModelEntry = library.named(name)
            return entry
    folder = Path(name).expanduser()
    if folders.exists(folder) and folder.is_dir():
        whole = str(folder.resolve())
        if folders.spelled(whole) != whole:
            raise UsageError(f"the name of {folders.spelled(whole)} is not UTF-8; rename it.")
        return _local(name, folder)
    for library in _LIBRARIES:
        if library.knows(name):
            entry = library.named(library.PREFIX + name)
            return entry
    if os.sep in name:
        raise UsageError(f"{name} does not exist; name a folder that does, or a model.")
    raise registry.unknown("model", name, [*_MODELS, *_spelled_otherwise(name)])


def _spelled_otherwise(name: str) -> list[str]:
    """The spellings of a name in libraries without hyphens, such as resnet18 for resnet-18."""
    registered = {registry.plain(each) for each in _MODELS}
    if registry.plain(name) in registered or not re.search(r"\d", name):
        return []  # so that no library is imported
    others = (name.casefold().replace("-", joint) for joint in ("", "_"))
    return [each for each in others if any(library.knows(each) for library in _LIBRARIES)]


def place(name: str) -> str:
    """The name of a model; for a local folder its absolute path."""
    folder = Path(name).expanduser()
    local = name not in _MODELS and folders.exists(folder) and folder.is_dir()
    return str(folder.resolve()) if local else name


def stamp(name: str) -> str:
    """The sizes and times of the files of a model in a folder; empty for other names."""
    files = Path(name).expanduser().glob("*.[js]*") if name not in _MODELS else ()
    return " ".join(sorted(f"{f.name} {f.stat().st_size} {f.stat().st_mtime_ns}" for f in files))


def library_of(folder: Path) -> str:
    """The library that wrote a folder, such as `timm`; raises DataError if none did."""
    if documents.read_foreign(folder / CONFIG).get("library") == "razorctl":
        return "razorctl"  # a segmentation head on a timm backbone
    owner, _ = _owner(str(folder), folder)
    return str(owner.__name__).rpartition(".")[2]


def _local(name: str, folder: Path) -> ModelEntry:
    """The entry of a folder, by the config.json of the library that saved it."""
    _, config = _owner(name, folder)
    weights.check_layers(folder / CONFIG, config)

    def entry(place: str) -> ModelEntry:
        library, settings = _owner(place, Path(place))
        local: ModelEntry = library.local(name, Path(place).resolve(), settings)
        return local

    return tried(name, entry)


def tried(name: str, *attempts: Callable[[str], T]) -> T:
    """The result of the first attempt to build a model.

    Raises DataError if it fails, with the setting at fault by `weights.blamed`. Each attempt has
    fewer checks than the one before it.
    """
    try:
        return attempts[0](name)
    except Exception as error:
        raise_lack(error)
        cause, file, setting = error.__cause__ or error, Path(name) / CONFIG, None
        if isinstance(cause, RazorError) or weights.COPY in name:
            raise
        with suppress(Exception), told_before():
            attempts[-1](name)
            attempts = attempts[:1]  # only the stricter one fails
        with suppress(OSError, ValueError), told_before():
            setting = weights.blamed(file.parent, attempts[-1], cause)
        if setting is None and isinstance(error, RazorError):
            raise
        where = setting or (file if file.exists() else None)
        mend = f"correct {where}" if where else "update its library"
        raise DataError(
            f"{name} cannot be read ({reason_of(cause)}); {mend}, or name another model."
        ) from error


def _owner(name: str, folder: Path) -> tuple[Any, Any]:
    """The library that saved a folder, and its config.json."""
    try:
        config = documents.read_foreign(folder / CONFIG)
    except FileNotFoundError:
        other = next((what for file, what in OTHERS.items() if any(folder.glob(file))), None)
        if other is not None:
            raise DataError(f"{name} is {other}.") from None
        raise DataError(
            f"{name} has no {CONFIG}; name a folder that save_pretrained, timm or a run wrote."
        ) from None
    except (OSError, ValueError) as error:
        raise_lack(error)
        raise DataError(f"{folder / CONFIG} cannot be read ({error}); correct it.") from None
    for library in _LIBRARIES:
        if library.owns(config):
            return library, config
    raise DataError(f"{folder / CONFIG} is of no library that razorctl knows; name another folder.")


def of_job(job: Job) -> Model:
    """The model of a job, with the job's settings; raises what `find` raises."""
    return find(job.model, job.task).fed(job)


def find(name: str, task: str | None = None) -> Model:
    """The model with that name for a task; None is its usual task.

    Raises UsageError with the nearest name if there is none, and for an unsupported task.
    """
    entry = named(name)
    chosen = next((able for able in entry.tasks if able == (task or entry.tasks[0])), None)
    if chosen is None:
        raise UsageError(
            f"{name} cannot be trained for {task}; choose another model, or one of "
            f"{', '.join(entry.tasks)} with --task."
        )
    model = entry.of(chosen)
    return replace(model, defaults={**model.defaults, "task": chosen})
