"""The interface of a pretrained model: how it is built, fed, saved and loaded."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from razorctl.config.job import Job
from razorctl.config.tasks import OF_ROWS, Task
from razorctl.models.joined_texts import Shape
from razorctl.models.rows import Progress, Rows

if TYPE_CHECKING:
    from torch import Tensor, nn

    from razorctl.models.transformers.writing import Writer
    from razorctl.step import ByLogits

Modality = Literal["image", "text"]
Size = int | None  # pixels of an image's side, or tokens of a text; None is the model's own
Transform = Callable[[Rows], Rows]
Shapes = Sequence[Shape]
ANY: Shapes = ()


@dataclass(frozen=True)
class RenderedChat:
    """A conversation as a model reads it: parts of its text, each with whether it is trained.

    templated: whether the tokenizer itself has a chat template.
    """

    templated: bool
    parts: Sequence[tuple[str, bool]]


@dataclass(frozen=True, kw_only=True)
class Model(ABC):
    """A pretrained model for a task.

    Methods raise UsageError for an input size that the model cannot take.

    Args:
        name, summary: as `razorctl list` shows them.
        task: what it is trained for. Language models have 0 classes.
        defaults: field of `Job` -> value. Learning rate and weight decay are in a mapping under the
            optimizer's name, since they suit only that optimizer.

    `own_defaults` has the defaults that differ for user data; its `times` multiplies the usual
    epochs. `modality` is what the model takes. `pads` says whether the inputs of a batch are padded
    to the longest of them, so that batches have several shapes.
    """

    name: str
    summary: str
    task: Task
    defaults: Mapping[str, Any] = field(default_factory=dict)
    modality: ClassVar[Modality]
    own_defaults: ClassVar[Mapping[str, Any]] = {}

    @property
    def pads(self) -> bool:
        return False

    @property
    def unproven(self) -> bool:
        """Whether its files may be anyone's, so that `check` and a traced step try them first."""
        return False

    @abstractmethod
    def build(self, classes: int, input_size: Size = None, pretrained: bool = True) -> "nn.Module":
        """The pretrained model with a fresh classifier.

        Raises MissingError if the weights cannot be found, and DataError if they cannot be read.
        If not `pretrained`, all weights are fresh, and no file and no network is needed.
        """

    def bare(self, classes: int, input_size: Size = None) -> "nn.Module":
        """The same model with fresh weights, without files or network."""
        return self.build(classes, input_size, False)

    @abstractmethod
    def transform(
        self, model: "nn.Module", input_size: Size = None, shapes: Shapes = ANY
    ) -> Transform:
        """A function from the data set rows of a batch to {"inputs": [...], "labels": [...]}.

        There are no labels if the rows have none. All inputs of a batch have one shape. Texts are
        padded to the longest, rounded up to 8 tokens, and at most to the input size.

        shapes: for a model that `pads`, the few shapes that compiled steps and CUDA graphs need.
        """

    @abstractmethod
    def example(self, model: "nn.Module", batch_size: int, input_size: Size = None) -> Any:
        """Inputs of the largest shape that a batch of transformed rows can have."""

    @abstractmethod
    def logits(self, model: "nn.Module", inputs: Any) -> "Tensor":
        """Logits [batch, classes] of a batch of inputs; for embedding as `TextEmbedder.logits`.

        For regression they are numbers [batch, 1], for segmentation [batch, classes, height, width]
        in the size of the images, for a language model [batch, tokens, vocabulary].
        """

    def losses(self, job: Job, class_weights: "Tensor | None" = None) -> "ByLogits":
        """The losses of its micro-batches; class_weights: as in `step.losses_of`."""
        from razorctl.step import ByLogits

        return ByLogits(self.logits, job, class_weights)

    @abstractmethod
    def save(
        self, model: "nn.Module", classes: Sequence[str], input_size: Size, folder: Path
    ) -> None:
        """Writes model.safetensors and a config, as the model's own library loads them.

        The config has the names of the classes and tells how inputs are prepared.
        """

    @abstractmethod
    def load(self, folder: Path, input_size: Size = None) -> tuple["nn.Module", Transform]:
        """The model that `save` wrote to a folder, and its transform; reads nothing else."""

    def files(self, weights: bool) -> Sequence[Path]:
        """The files of the pretrained model that are read, with or without weights."""
        return ()

    def check(self, model: "nn.Module", weights: bool) -> None:
        """Raises an error if local files do not agree, or could not be written again.

        model: as `bare` returns it. weights: whether weights are read.
        """
        return

    def augmented(self, model: "nn.Module", input_size: Size, augment: str) -> Transform:
        """Like `transform` of images, with changes from the default generators: `Job.augment`."""
        raise NotImplementedError

    def masked(self, model: "nn.Module") -> Transform | None:
        """Like `transform`, with the random masks of training; None if training draws none."""
        return None

    def sequences(self, rows: Any, input_size: Size, progress: Progress) -> Any:
        """The rows that `transform` takes: for language models with the tokens of texts."""
        return rows

    def lengths(self, rows: Any, input_size: Size) -> Sequence[int]:
        """The tokens of each text before `transform` cuts it; of long texts only the first ones.

        Empty if no text is cut, or if `sequences` reports it.
        """
        return ()

    def fed(self, job: Job) -> "Model":
        """The model with the settings of a job."""
        return self

    def longest(self, input_size: Size) -> int:
        """The most tokens of a text."""
        raise NotImplementedError

    def packs(self) -> bool:
        """Whether it separates the texts of one sequence."""
        return False

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""
        raise NotImplementedError

    def sample(self, row: Mapping[str, Sequence[int]]) -> RenderedChat:
        """What a causal language model reads of a row of `sequences` with a conversation."""
        raise NotImplementedError

    def writer(self, model: "nn.Module") -> "Writer":
        """Continues texts by a causal language model."""
        raise NotImplementedError

    def batch(
        self, model: "nn.Module", batch_size: int, input_size: Size, classes: int
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

        def of(task: Task) -> Model:
            return replace(model, task=task)

        return cls(model.name, model.summary, model.modality, tasks, of)
