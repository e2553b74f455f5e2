"""Models by name.

Every module of this package is imported, is for one library, and defines `MODELS`, a tuple of
`ModelEntry`. It imports its library inside functions, so that listing models loads no torch.
"""

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from razorctl import registry
from razorctl.config.tasks import OF_ROWS, Task
from razorctl.errors import DataError, RazorError, UsageError, raise_lack, reason_of
from razorctl.models import weights
from razorctl.models.rows import Progress as Progress
from razorctl.models.rows import Rows as Rows
from razorctl.system import documents, folders

if TYPE_CHECKING:
    from torch import Tensor, nn

    from razorctl.models.transformers.writing import Writer

Modality = Literal["image", "text"]
T = TypeVar("T")


@dataclass(frozen=True)
class RenderedChat:
    """A conversation as a model reads it: parts of its text, each with whether it is trained.

    templated: whether the tokenizer itself has a chat template.
    """

    templated: bool
    parts: Sequence[tuple[str, bool]]


@dataclass(frozen=True)
class Model:
    """A pretrained model for a task.

    An input size is the pixels of an image's side, or the tokens of a text; None is the model's
    own. The functions raise UsageError for a size that the model cannot take.

    Args:
        name, summary: as `razorctl list` shows them.
        modality: whether it takes images or texts.
        task: what it is trained for. Language models have 0 classes.
        build: (classes, input size) -> the pretrained model with a fresh classifier. Raises
            MissingError if the weights cannot be found, and DataError if they cannot be read.
        bare: (classes, input size) -> the same model with fresh weights, without files or network.
        transform: (model, input size) -> a function from the data set rows of a batch to {"inputs":
            [...], "labels": [...]}, without labels if the rows have none. All inputs of a batch
            have one shape. Texts are padded to the longest, rounded up to 8 tokens, and at most
            to the input size.
        example: (model, batch size, input size) -> inputs of the largest shape that a batch of
            transformed rows can have, for tracing saved bytes.
        logits: (model, batched inputs) -> logits [batch, classes]; for regression numbers
            [batch, 1]; for segmentation [batch, classes, height, width], in the size of the images;
            for a language model [batch, tokens, vocabulary].
        save: (model, class names, input size, folder) -> writes model.safetensors and, for the
            model's own library, its configuration with these names and how its inputs are prepared.
        load: (folder, input size) -> the model that `save` wrote there, and its transform; nothing
            else is read, and no network.
        augmented: (model, input size, `Job.augment`) -> a function like the result of `transform`,
            with changes drawn from the default generators; None if inputs are never augmented.
        padded: (model, input size, widths, sequences) -> like the result of `transform`, but all
            inputs have one of these widths in tokens, as compiled steps and CUDA graphs need.
            Joined texts have the first, and a multiple of these sequences, else 0. None if inputs
            always have one shape.
        trained: like `transform`, with the random changes that training needs, as for masked
            language models; None if there are none.
        sequences: (rows, input size, `Progress`) -> the rows that `transform` takes, with the
            tokens of texts; None if it takes rows as they are.
        lengths: (rows, input size) -> the tokens of these texts, of long ones of their beginning;
            None if no text is cut, or if `sequences` reports it.
        writer: (model) -> a `Writer` for a causal language model; None for other models.
        packed: (`Job.packing`) -> the model for conversations; None if it never takes them.
        sample: (row of `sequences`) -> what the model reads; None if all parts are trained.
        longest: (input size) -> the most tokens of a text; None for images.
        decode: (tokens) -> their text; None for images.
        packs: whether it separates the texts of one sequence.
        files: (whether weights are read) -> the files of the pretrained model that are read.
        check: (a model of `bare`, whether weights are read) -> raises an error if the local files
            do not agree, or could not be written again; None if there are none.
        defaults: field of `Job` -> value. Learning rate and weight decay are in a mapping under the
            optimizer's name, since they suit only that optimizer.
        own: overrides of `defaults` for user data; `times` multiplies the usual epochs.
    """

    name: str
    summary: str
    modality: Modality
    task: Task
    build: Callable[[int, int | None], "nn.Module"]
    bare: Callable[[int, int | None], "nn.Module"]
    transform: Callable[["nn.Module", int | None], Callable[[Rows], Rows]]
    example: Callable[["nn.Module", int, int | None], Any]
    logits: Callable[["nn.Module", Any], "Tensor"]
    save: Callable[["nn.Module", Sequence[str], int | None, Path], None]
    load: Callable[[Path, int | None], tuple["nn.Module", Callable[[Rows], Rows]]]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    augmented: Callable[["nn.Module", int | None, str], Callable[[Rows], Rows]] | None = None
    padded: (
        Callable[["nn.Module", int | None, Sequence[int], int], Callable[[Rows], Rows]] | None
    ) = None
    trained: Callable[["nn.Module", int | None], Callable[[Rows], Rows]] | None = None
    sequences: Callable[[Any, int | None, Progress], Any] | None = None
    lengths: Callable[[Rows, int | None], Sequence[int]] | None = None
    writer: Callable[["nn.Module"], "Writer"] | None = None
    packed: Callable[[bool], "Model"] | None = None
    sample: Callable[[Mapping[str, Sequence[int]]], RenderedChat] | None = None
    longest: Callable[[int | None], int] | None = None
    decode: Callable[[Sequence[int]], str] | None = None
    packs: Callable[[], bool] = lambda: False
    files: Callable[[bool], Sequence[Path]] = lambda _: ()
    check: Callable[["nn.Module", bool], object] | None = None
    own: Mapping[str, Any] = field(default_factory=dict)

    def fed(self, packing: bool | None) -> "Model":
        """The model for the rows of a job with this `packing`."""
        if packing is None or self.packed is None:
            return self
        return replace(self.packed(packing), defaults=self.defaults)

    def batch(
        self, model: "nn.Module", batch_size: int, input_size: int | None, classes: int
    ) -> tuple[Any, "Tensor"]:
        """`example` with labels that are all 0."""
        import torch

        inputs = self.example(model, batch_size, input_size)
        if self.task == "segmentation":
            shape: Sequence[int] = (batch_size, *inputs.shape[-2:])
        elif self.task in OF_ROWS:
            shape = (batch_size, classes) if self.task == "multi-label" else (batch_size,)
        else:
            shape = inputs["input_ids"].shape
        numbers = self.task in ("regression", "multi-label")
        return inputs, torch.zeros(shape, dtype=torch.float32 if numbers else torch.long)


def prepared(inputs: list[Any], rows: Rows) -> Rows:
    """The rows that a transform returns; labels other than class numbers become fp32 tensors."""
    import torch

    if "label" not in rows:
        return {"inputs": inputs}
    labels = [
        label if isinstance(label, int) else torch.tensor(label, dtype=torch.float32)
        for label in rows["label"]
    ]
    return {"inputs": inputs, "labels": labels}


@dataclass(frozen=True)
class ModelEntry:
    """A name of a pretrained model.

    Args:
        tasks: the tasks that it can be trained for, the most usual first.
        of: task -> the model for it.
    """

    name: str
    summary: str
    modality: Modality
    tasks: tuple[Task, ...]
    of: Callable[[Task], Model]

    @classmethod
    def single(cls, model: Model) -> "ModelEntry":
        """The entry of a model for one task, or of a classifier, for all of OF_ROWS."""
        tasks = OF_ROWS if model.task in OF_ROWS else (model.task,)
        return cls(
            *(model.name, model.summary, model.modality, tasks),
            lambda task: replace(model, task=task),
        )


FROM_SCRATCH = (
    "{model} begins with random weights, nothing in it is pretrained: expect to need far more rows "
    "and epochs."
)


@contextmanager
def told_before() -> Iterator[None]:
    """Inside the block, models are built without warnings about new parts, as in a resumed run."""
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
    own = name not in _MODELS and folders.exists(folder) and folder.is_dir()
    return str(folder.resolve()) if own else name


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
        found: ModelEntry = library.local(name, Path(place).resolve(), settings)
        return found

    return tried(name, entry)


def tried(name: str, *attempts: Callable[[str], T]) -> T:
    """The result of the first attempt to build a model, which its library may not have checked.

    Raises DataError if it fails, naming the setting at fault as `weights.blamed` finds it. The last
    attempt is the one with the fewest checks.
    """
    try:
        return attempts[0](name)
    except Exception as error:
        raise_lack(error)
        cause, file, found = error.__cause__ or error, Path(name) / CONFIG, None
        if isinstance(cause, RazorError) or weights.COPY in name:
            raise
        with suppress(Exception), told_before():
            attempts[-1](name)
            attempts = attempts[:1]  # only the stricter one fails
        with suppress(OSError, ValueError), told_before():
            found = weights.blamed(file.parent, attempts[-1], cause)
        if found is None and isinstance(error, RazorError):
            raise
        where = found or (file if file.exists() else None)
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


def find(name: str, task: str | None = None, packing: bool | None = None) -> Model:
    """The model with that name for a task; None is its usual task. packing: as in `Model.fed`.

    Raises UsageError with the nearest name if there is none, and for an unsupported task.
    """
    entry = named(name)
    chosen = next((own for own in entry.tasks if own == (task or entry.tasks[0])), None)
    if chosen is None:
        raise UsageError(
            f"{name} cannot be trained for {task}; choose another model, or one of "
            f"{', '.join(entry.tasks)} with --task."
        )
    model = entry.of(chosen)
    return replace(model, defaults={**model.defaults, "task": chosen}).fed(packing)
