"""The files of a pretrained model of transformers, on the hub or in a folder."""

import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from razorctl import units
from razorctl.config.tasks import Task
from razorctl.errors import DataError, UsageError
from razorctl.models import weights
from razorctl.system import documents, hub

if TYPE_CHECKING:
    from torch import nn

log = logging.getLogger(__name__)

# Without it transformers asks on standard input whether to run Python code from a model's folder.
NO_CODE = {"trust_remote_code": False}
FOREIGN = "needs code of its own, which razorctl never runs"
# Training needs no cache, and transformers warns about one with activation checkpointing.
WITHOUT_CACHE = {"use_cache": False}
CONFIG = "config.json"
WEIGHTS, INDEX = "model*.safetensors", "model.safetensors.index.json"  # in one file or several
TOKENIZER_CONFIG = "tokenizer_config.json"
TOKENIZER = (
    *("tokenizer.json", TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "*.model", "chat_template.jinja"),
)
PROCESSOR = "preprocessor_config.json"
PROCESSORS = "processor_config.json"  # of images and texts, as release 5 writes it
GENERATION = "generation_config.json"
# All files that are read besides weights.
SETTINGS = (CONFIG, PROCESSOR, PROCESSORS, GENERATION, *TOKENIZER)
# Names of the setting for the most tokens of a text.
LONGEST = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")
# RoBERTa and its kin; their positions begin after the padding position.
SHIFTED = frozenset(
    {"roberta", "xlm-roberta", "camembert", "data2vec-text", "esm", "ibert", "longformer", "mpnet"}
    | {"luke", "roberta-prelayernorm", "xlm-roberta-xl", "xmod"}
)


@dataclass(frozen=True)
class PretrainedFiles:
    """The files of a pretrained model of transformers: config, weights, tokenizer, processor.

    place: its repository on the hub, or a local folder. known: its config, so that planning needs
    no hub; None reads it.
    """

    name: str
    place: str | Path
    known: Mapping[str, Any] | None = None

    @cached_property
    def config(self) -> Any:
        """The config, as an object of transformers.

        Raises MissingError if it is not available, and UsageError if the model needs custom code
        or is quantized.
        """
        from transformers import AutoConfig

        if self.known is not None:
            return AutoConfig.for_model(**self.known)
        return self._read_config()

    def _read_config(self) -> Any:
        from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

        folder = self.folder(CONFIG)
        with self.reading(folder):
            config, _ = PreTrainedConfig.get_config_dict(folder)
            kind = config.get("model_type")
        if kind not in CONFIG_MAPPING:
            why = FOREIGN
            if "auto_map" not in config:
                why = f"is of the type {kind}, which this version of transformers lacks"
            raise UsageError(f"{self.name} {why}; choose another model, or update transformers.")
        if "quantization_config" in config:
            method = config["quantization_config"].get("quant_method", "to few bits")
            raise UsageError(
                f"the weights of {self.name} are quantized ({method}), so they cannot be trained; "
                "choose the model that they were made from."
            )
        with self.reading(folder), quiet_transformers():
            return AutoConfig.from_pretrained(folder, **NO_CODE)

    @contextmanager
    def reading(self, folder: Path, file: str = CONFIG) -> Iterator[None]:
        """`hub.reading` of a file; turns an error about custom code into a UsageError."""
        mend = self.mend and f"correct its {file}, or {self.mend}"
        try:
            with hub.reading(self.name, folder, mend):
                yield
        except DataError as error:
            if "contains custom code" not in str(error):
                raise
            raise UsageError(f"{self.name} {FOREIGN}; choose another model.") from None

    @property
    def mend(self) -> str | None:
        """The end of an error message about its files; None for the hub's default."""
        return "name another folder" if isinstance(self.place, Path) else None

    def folder(self, *files: str, more: tuple[str, ...] = ()) -> Path:
        """A local folder with these files, and with the files of `more` that exist.

        Raises MissingError if a file is missing on the hub, DataError if in a folder.
        """
        if isinstance(self.place, str):
            return hub.fetch(self.name, self.place, files, "model", more)
        missing = [file for file in files if not any(self.place.glob(file))]
        if missing:
            raise DataError(f"{self.name} has no {missing[0]}; {self.mend}.")
        return self.place

    def files(self, weights: bool) -> list[Path]:
        """The files that are read, with or without weights; raises what `folder` raises."""
        stored = (WEIGHTS, INDEX) if weights else ()
        folder = self.folder(*stored[:1], more=(*SETTINGS, *stored))
        return [file for each in (*SETTINGS, *stored) for file in sorted(folder.glob(each))]

    def local(self, file: str) -> bool:
        """Whether the place is a local folder that has such a file."""
        return isinstance(self.place, Path) and any(self.place.glob(file))

    def check(self, fresh: tuple[str, ...], model: Any, read: bool) -> None:
        """`Model.check`, for the config and the weights; fresh: as in `built`."""
        import torch

        body = f"{model.base_model_prefix}."
        getattr(model.config, "validate", lambda: None)()  # as `save_pretrained` does
        type(model.config).from_dict(documents.parse(model.config.to_json_string().encode()))
        stored = self._shapes() if read and self.known is None else {}
        if not stored:
            return
        weights.check_lists(model, stored)
        state = {name: torch.empty(shape, device="meta") for name, shape in stored.items()}
        config = deepcopy(model.config)
        own_text, text = self.config.get_text_config(), config.get_text_config()
        if hasattr(own_text, "vocab_size"):  # the stored weights' size, if the model has grown
            text.vocab_size = own_text.vocab_size
        loaded, loading = self._loaded(
            type(model), None, fresh, config=config, state_dict=state, device_map={"": "meta"}
        )
        same_head = type(model).__name__ in (getattr(config, "architectures", None) or ())
        unexpected = loading["unexpected_keys"]
        if left := weights.unused(loaded, stored, unexpected, fresh, same_head):
            log.warning(
                "some weights of %s have no parameter in its model and are left out (%s)",
                self.name,
                ", ".join(sorted(left)),
            )
        for pair in model.all_tied_weights_keys.items():
            names = (*pair, *(name.removeprefix(body) for name in pair))
            there = sorted({name for name in names if name in stored})
            if self.local(WEIGHTS) and weights.differ(Path(self.place), WEIGHTS, there):
                raise ValueError(f"{' and '.join(there)} differ, and its config ties them")

    def _shapes(self) -> weights.Shapes:
        """The shapes of its weights; empty, with a warning, if the hub does not show them."""
        if isinstance(self.place, Path):
            return weights.shapes(self.place, WEIGHTS)
        shapes = hub.shapes(self.place) or weights.shapes(self.folder(CONFIG), WEIGHTS)
        if not shapes:
            log.warning(
                "the weights of %s are not compared with its config, as the hub shows no shapes",
                self.name,
            )
        return shapes

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the model; see `tokenizer_with`."""
        return self.tokenizer_with()

    def tokenizer_with(self, **settings: Any) -> Any:
        """Its tokenizer; without a padding token it pads with the end token.

        Raises MissingError if it is not available, DataError if it cannot be used, and UsageError
        if it needs custom code. settings: overrides of its own settings.
        """
        from transformers import AutoTokenizer

        folder = self.folder(TOKENIZER_CONFIG, more=(CONFIG, *TOKENIZER))
        with self.reading(folder, TOKENIZER_CONFIG):
            tokenizer: Any = AutoTokenizer.from_pretrained(folder, **settings, **NO_CODE)
            tokenizer("a")
        if tokenizer.pad_token is None:
            if tokenizer.eos_token is None:
                raise DataError(
                    f"the tokenizer of {self.name} has no padding token; choose another model, or "
                    "give it one."
                )
            tokenizer.pad_token = tokenizer.eos_token
        return tokenizer

    @property
    def processor(self) -> Mapping[str, Any]:
        """The settings of its image processor."""
        folder = self.folder(more=(PROCESSOR, PROCESSORS))
        both = (folder / PROCESSORS).exists() and not (folder / PROCESSOR).exists()
        folder = self.folder(file := PROCESSORS if both else PROCESSOR)
        with self.reading(folder, file):
            settings: Mapping[str, Any] = documents.read_foreign(folder / file)
            return settings["image_processor"] if both else settings

    def built(self, auto: Any, fresh: tuple[str, ...] = (), **settings: Any) -> "nn.Module":
        """The pretrained model in single precision, by an `AutoModelFor...` class.

        If the files have another head, its head is new, and a warning says so. fresh: prefixes of
        the names of weights that need not be pretrained.
        """
        _ = self.config if self.known is None else None  # refuses a model that cannot be trained
        folder = self.folder(CONFIG, WEIGHTS, more=(INDEX,))
        with self.reading(folder, "weights"):
            model, loading = self._loaded(auto, folder, fresh, **self._without_cache(), **settings)
        other = {name for name, *_ in loading["mismatched_keys"]}
        self._tell(model, {*loading["missing_keys"], *other})
        built: nn.Module = model
        if new := self._grow(built):
            log.warning(
                "the embedding of %s gets %s for new tokens of its tokenizer (%s)",
                self.name,
                units.count(len(new), "row"),
                ", ".join(new[:5]),
            )
        return built

    def _loaded(
        self, kind: Any, folder: Path | None, fresh: tuple[str, ...], **settings: Any
    ) -> tuple[Any, Mapping[str, Any]]:
        """A model and how its weights were loaded; raises ValueError if they do not fit."""
        import torch

        with quiet_transformers():
            model, loading = kind.from_pretrained(
                folder,
                dtype=torch.float32,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **NO_CODE,
                **settings,
            )
            absent = {w for w in loading["missing_keys"] if not w.startswith(fresh)}
            absent -= self._new(model, absent)
        for name, there, here in sorted(loading["mismatched_keys"]):
            if not name.startswith(fresh):
                raise ValueError(
                    f"{name} is {[*there]} in its weights, and {[*here]} by its config"
                )
        if absent:
            raise ValueError(f"{min(absent)} is not among its weights")
        return model, loading

    def _new(self, model: Any, absent: set[str]) -> set[str]:
        """The absent weights that belong to a head which the files lack.

        A head is outside the body. A pooler on top of the body counts too, as many heads have none.
        """
        import torch
        import transformers

        named = (getattr(model.config, "architectures", None) or [""])[0]
        if named == type(model).__name__:
            return set()
        kind = getattr(transformers, named, None)
        other_head: set[str] = set()  # the names of the weights of the head in the files
        if absent and isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel):
            with torch.device("meta"):
                other_head = {*kind(model.config).state_dict()}
        body = f"{model.base_model_prefix}."
        head = {name for name in absent if not name.startswith(body)} - other_head
        return head | {name for name in absent if "pooler" in name.split(".")}

    def _tell(self, model: Any, new: set[str]) -> None:
        """Warns which parts of a pretrained model are new, if any but the pooler of a body."""
        new = {name for name in new if not name.startswith("pooler.")}
        if not new:
            return
        weights = {name for name, _ in model.named_parameters()}

        def part(name: str) -> str:
            """The largest module around a weight with only new weights."""
            parts = name.split(".")
            modules = (".".join(parts[:size]) for size in range(1, len(parts)))
            return next(
                (m for m in modules if {w for w in weights if w.startswith(f"{m}.")} <= new), name
            )

        head = "classifier" if "Classification" in type(model).__name__ else "head"
        log.warning(
            "the %s of %s is new; it is trained from random weights (%s)",
            head,
            self.name,
            ", ".join(sorted({part(name) for name in new})),
        )

    def bare(self, auto: Any, **settings: Any) -> "nn.Module":
        """The model with fresh weights."""
        config = deepcopy(self.config)
        for name, value in {**self._without_cache(), **settings}.items():
            setattr(config, name, value)
        model: nn.Module = auto.from_config(config, **NO_CODE)
        self._grow(model)
        return model

    def _grow(self, model: Any) -> list[str]:
        """Adds rows to an embedding for extra tokens of a local tokenizer; returns these tokens.

        A new row is the mean of the other rows, in the embedding and in the head.
        """
        from torch import nn

        model = getattr(model, "text_model", model)  # of two towers
        reads = self.local(TOKENIZER_CONFIG) and model.main_input_name == "input_ids"
        embedding = model.get_input_embeddings() if reads else None
        if not isinstance(embedding, nn.Embedding):
            return []
        tokens = {number: token for token, number in self.tokenizer.get_vocab().items()}
        rows, size = embedding.num_embeddings, max(tokens) + 1
        if size <= rows:
            return []
        with quiet_transformers():
            model.resize_token_embeddings(size, mean_resizing=False)
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
            if layer is not None:
                layer.weight.data[rows:] = layer.weight.data[:rows].mean(0)
        return [tokens.get(number, "") for number in range(rows, size)]

    def _without_cache(self) -> dict[str, Any]:
        return WITHOUT_CACHE if hasattr(self.config, "use_cache") else {}

    @property
    def longest(self) -> int | None:
        """The most tokens of a text; None if there is no such limit."""
        sizes = (getattr(self.config, name, None) for name in LONGEST)
        longest = next((size for size in sizes if isinstance(size, int)), None)
        if longest is not None and self.config.model_type in SHIFTED:
            longest -= 1 + (self.config.pad_token_id or 0)
        return longest

    def length(self, tokens: int | None, usual: int) -> int:
        """The tokens of a text: `tokens`, or `usual` up to the model's limit.

        Raises UsageError for more than the limit.
        """
        longest = self.longest
        if longest is None:
            return tokens or usual
        if tokens is not None and tokens > longest:
            raise UsageError(
                f"{self.name} takes texts of up to {units.count(longest, 'token')}, not "
                f"{tokens:,}; use at most {longest}."
            )
        return tokens or min(usual, longest)


# Task -> transformers' name for it; its models choose their own loss by the name.
PROBLEMS: Mapping[Task, str] = {
    "regression": "regression",
    "multi-label": "multi_label_classification",
}


def name_classes(model: Any, classes: Sequence[str], task: Task) -> None:
    """Gives the config of a classifier its task and the names of its classes."""
    model.config.problem_type = PROBLEMS.get(task)  # an earlier head may have had another
    model.config.id2label = dict(enumerate(classes))
    model.config.label2id = {label: number for number, label in enumerate(classes)}


def has_argument(model: "nn.Module | type[nn.Module]", argument: str) -> bool:
    """Whether the forward of a model, or of its class, has an argument of that name."""
    kind = model if isinstance(model, type) else type(model)
    return argument in inspect.signature(kind.forward).parameters


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hides transformers' progress bar and its warning that the classifier is fresh."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
