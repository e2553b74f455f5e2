"""The model of a finished run as ONNX, written by torch's exporter and checked by onnxruntime."""

import builtins
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from razorctl.errors import RazorError, reason_of
from razorctl.training.predicting.inference import Trained

FILE = "model.onnx"
TOWERS = ("vision_model.onnx", "text_model.onnx")  # of images and of texts, as Optimum calls them
IMAGES = ("pixel_values",)  # the input of images
OBJECTS = ("scores", "boxes")  # the outputs of detection
TOKENS = 16  # tokens of the traced texts; the model takes texts of any length
ROUNDING = 1e-3  # most difference of logits, as a share of the largest
AXES = ("batch", "tokens")  # of texts; images have the first one
MEND = "export it with --to safetensors"


class ExportedModel(nn.Module):
    """A model that takes its inputs one by one, and returns a tuple of outputs.

    outputs: their names. Those of OBJECTS are the scores [batch, queries, classes] of classes and
    the boxes [batch, queries, 4], centers and sizes as shares; others are logits.
    """

    def __init__(
        self,
        model: nn.Module,
        names: tuple[str, ...],
        logits: Callable[[nn.Module, Any], Tensor],
        outputs: Sequence[str],
    ) -> None:
        super().__init__()
        self.model, self.names, self.logits, self.outputs = model, names, logits, outputs

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The outputs for inputs in the order of `names`, which is empty for images."""
        given: Any = dict(zip(self.names, inputs, strict=True)) if self.names else inputs[0]
        logits = self.logits(self.model, given)
        if self.outputs != OBJECTS:
            return (logits,)
        return logits[..., :-4], logits[..., -4:]


class _OtherThreads:
    """A stream that drops the output of this thread; other threads show the progress."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._thread = stream, threading.get_ident()

    def write(self, text: str) -> int:
        if threading.get_ident() != self._thread:
            self._stream.write(text)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hides warnings, logs and output of torch, such as graphs that it cannot export."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    stream: Any = _OtherThreads(sys.stderr)
    try:
        with warnings.catch_warnings(), redirect_stderr(stream):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextmanager
def _free_lengths(model: nn.Module) -> Iterator[None]:
    """In the files of a model's classes, `len` of a tensor gives its first size.

    The built-in function gives a number, which would fix the batch size. The exporter then traces
    the model again in a way that takes twice as long.
    """

    def length(value: Any) -> Any:
        return value.shape[0] if isinstance(value, Tensor) else builtins.len(value)

    every = {sys.modules.get(type(module).__module__) for module in model.modules()}
    files = [file for file in every if file and "len" not in vars(file)]
    for file in files:
        vars(file)["len"] = length
    try:
        yield
    finally:
        for file in files:
            del vars(file)["len"]


def write(trained: Trained, folder: Path) -> dict[str, Any]:
    """Writes FILE, or for two towers a file of TOWERS each, into a folder.

    Weights of more than 2 GB are beside a file. The size of images is the run's; the length of
    texts and the batch size are free. A detection model has the outputs of OBJECTS, and takes a
    mask of the padding if its images have padding. Returns the opset, the axes of each input and
    output by name, and the largest difference of an output from the run's model. Raises RazorError
    if the model cannot be exported, or if a file computes other outputs.

    trained: a model on the CPU.
    """
    inputs = _inputs(trained, 2, TOKENS)
    graphs: dict[str, tuple[Sequence[str], Sequence[str]]] = {FILE: (["logits"], [*inputs])}
    if trained.job.task == "detection":
        graphs = {FILE: (OBJECTS, [*inputs])}
    elif {*IMAGES} < inputs.keys():
        texts = [name for name in inputs if name not in IMAGES]
        both = (["image_embeds"], IMAGES), (["text_embeds"], texts)
        graphs = dict(zip(TOWERS, both, strict=True))
    parts = [
        _write(trained, {name: inputs[name] for name in names}, outputs, folder / file)
        for file, (outputs, names) in graphs.items()
    ]
    return {
        "opset": parts[0]["opset"],
        "inputs": {name: axes for part in parts for name, axes in part["inputs"].items()},
        "outputs": {name: axes for part in parts for name, axes in part["outputs"].items()},
        "difference": max(part["difference"] for part in parts),
    }


def _write(
    trained: Trained, inputs: Mapping[str, Tensor], outputs: Sequence[str], file: Path
) -> dict[str, Any]:
    """Writes a file with these inputs and outputs; see `write`."""
    names = tuple(inputs)
    alone = names == IMAGES and isinstance(_example(trained, 2), Tensor)
    taken = () if alone else names
    model = ExportedModel(trained.model, taken, trained.family.logits, outputs).eval()
    axes = dict(enumerate(AXES[:1] if {*IMAGES} <= {*names} else AXES))
    try:
        with _quiet(), _free_lengths(model), torch.no_grad():
            program = torch.onnx.export(
                model,
                tuple(inputs.values()),
                dynamo=True,
                dynamic_shapes=(tuple(axes for _ in names),),
                input_names=names,
                output_names=[*outputs],
                verbose=False,
            )
    except Exception as error:  # a model may raise anything
        reason = reason_of(error.__cause__ or error)
        raise RazorError(f"{trained.run} cannot be exported to ONNX ({reason}); {MEND}.") from error
    assert program is not None
    program.save(file)
    graph = program.model.graph
    return {
        "opset": program.model.opset_imports[""],
        "inputs": {str(each.name): _axes(each) for each in graph.inputs},
        "outputs": {str(each.name): _axes(each) for each in graph.outputs},
        "difference": _difference(trained, model, names, file),
    }


def _axes(value: Any) -> list[str | int]:
    """The axes of an input or an output: a number, or the name of a free axis."""
    return [each if isinstance(each, int) else str(each.value) for each in value.shape]


def _example(trained: Trained, batch: int) -> Any:
    return trained.family.example(trained.model, batch, trained.job.input_size)


def data_config(trained: Trained) -> Mapping[str, Any]:
    """The data config of a detection model, as in `models.boxes`."""
    family: Any = trained.family
    config: Mapping[str, Any] = family.data_config(trained.model, trained.job.input_size)
    return config


def _inputs(trained: Trained, batch: int, tokens: int) -> dict[str, Tensor]:
    """Random inputs by name; the mask of texts hides the last token of the first text."""
    example = _example(trained, batch)
    inputs = dict.fromkeys(IMAGES, example) if isinstance(example, Tensor) else {**example}
    if trained.job.task == "detection":
        taken = (*IMAGES, *(["pixel_mask"] if data_config(trained)["letterbox"] else []))
        inputs = {name: value for name, value in inputs.items() if name in taken}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(batch)
        for name, value in inputs.items():
            if name in IMAGES:
                inputs[name] = torch.randn(value.shape)
            elif name != "pixel_mask":
                inputs[name] = value[:, :tokens].clone()
        if "input_ids" in inputs:
            model: Any = getattr(trained.model, "text_model", trained.model)  # of two towers
            inputs["input_ids"].random_(model.get_input_embeddings().num_embeddings)
    if "attention_mask" in inputs or not {*IMAGES} & inputs.keys():
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        inputs["attention_mask"][0, -1] = 0
    return inputs


def _difference(trained: Trained, model: ExportedModel, names: Sequence[str], file: Path) -> float:
    """The largest difference of an output, on inputs of other sizes than the traced ones.

    Of detection it is the largest one of a query from the most similar query.

    Raises RazorError for more than ROUNDING.
    """
    every = _inputs(trained, 3, TOKENS // 2)
    inputs = {name: every[name] for name in names}
    with _quiet(), torch.no_grad():
        wanted = model(*inputs.values())
    try:
        found = _run(file, inputs)
    except Exception as error:  # onnxruntime's classes are not public
        raise RazorError(
            f"onnxruntime cannot run the ONNX model of {trained.run} ({reason_of(error)}); {MEND}."
        ) from error
    if model.outputs == OBJECTS:  # queries of nearly equal scores may be in another order
        apart = torch.cdist(torch.cat(found, -1), torch.cat(wanted, -1), torch.inf)
        difference = max(float(apart.amin(side).max()) for side in (1, 2))
    else:
        difference = float((found[0] - wanted[0]).abs().max())
    if not difference <= ROUNDING * max(float(output.abs().max()) for output in wanted):
        raise RazorError(
            f"the ONNX model of {trained.run} computes other {' and '.join(model.outputs)} than "
            f"the run's, by up to {difference:.2g}; {MEND}."
        )
    return difference


def _run(file: Path, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """The outputs that onnxruntime computes on the CPU."""
    import onnxruntime

    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    feed = {each.name: inputs[each.name].numpy() for each in session.get_inputs()}
    return [torch.from_numpy(output) for output in session.run(None, feed)]
