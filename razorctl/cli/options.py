"""The options that commands share: each has a setting, a help text and a panel.

`JOB` and `RECIPE` map fields of `Job` and `Recipe` to an option of the field's type; `PLANNING`
holds the options that say what to plan for. No option has a default: one that is not given is
None, and the dataclass, the model or the method supplies the value.
"""

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin

import typer

from razorctl.cli.command import option as option
from razorctl.cli.names import completes
from razorctl.cli.settings import AUTO
from razorctl.job import Job
from razorctl.recipe import Recipe

Command = Callable[..., None]


_of_job = partial(option, rich_help_panel="Job")
_of_data = partial(option, rich_help_panel="Data of one's own")
_of_recipe = partial(option, rich_help_panel="Recipe")
of_plan = partial(option, rich_help_panel="Planning")


def _batch_size(text: str) -> int | str:
    if text == AUTO:
        return text
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is neither an integer nor {AUTO}.") from None


def _typed(kind: type[Any], **infos: Any) -> dict[str, Any]:
    """Field name -> the field's type annotated with its option, for the fields in `infos`."""
    types = {field.name: field.type for field in fields(kind)}
    table: dict[str, Any] = {}
    for name, info in infos.items():
        # The dataclass checks choices itself: its error also names the nearest one.
        plain: Any = str if get_origin(types[name]) is Literal else types[name]
        table[name] = Annotated[plain | None, info]
    return table


MODEL = typer.Argument(
    help="Name of a model; `razorctl list` shows them.", autocompletion=completes("models")
)
JOB = _typed(
    Job,
    model=MODEL,
    dataset=typer.Argument(
        help="Name of a data set, hf:ORG/NAME, or a folder or table of one's own.",
        autocompletion=completes("data sets"),
    ),
    steps=_of_job(help="Optimizer steps."),
    epochs=_of_job(help="Passes over the data, instead of --steps."),
    task=_of_job(help="What to learn: classification, segmentation, causal-lm or masked-lm."),
    from_scratch=_of_job(help="Begin with random weights, not pretrained ones. [default: no]"),
    input_size=_of_job(help="Pixels of an image's side, or tokens. [default: the model's]"),
    batch_size=_of_job(
        help="Examples in a step; auto is the most that a plan allows in one pass.",
        parser=_batch_size,
        metavar="INTEGER|auto",
    ),
    accumulate=_of_job(help="Micro-batches accumulated in a step. [default: 1]"),
    processes=_of_job(help="Processes that share a batch, one per GPU. [default: torchrun's]"),
    strategy=_of_job(help="Of several processes: ddp, or fsdp, which shards. [default: ddp]"),
    precision=_of_job(help="fp32, bf16 or fp16. [default: what suits the device]"),
    optimizer=_of_job("--optimizer", help="sgd, adamw or adamw8bit. [default: the model's]"),
    weights=_of_job(help="Dtype of the weights: fp32, or bf16 rounded at random. [default: fp32]"),
    optimizer_in_backward=_of_job(help="Update each weight once its gradient is there."),
    augment=_of_job(help="Of training images: none, crop or rand. [default: the model's]"),
    mixup=_of_job(help="Alpha of mixup. [default: 0, which is none]"),
    cutmix=_of_job(help="Alpha of cutmix. [default: 0, which is none]"),
    label_smoothing=_of_job(help="Share of a label spread over all classes. [default: 0]"),
    learning_rate=_of_job("--lr", envvar="RAZORCTL_LR", help="Highest learning rate."),
    momentum=_of_job(help="Momentum of SGD."),
    weight_decay=_of_job(help="Weight decay, which biases and norms do without."),
    layer_decay=_of_job(help="Factor of the learning rate per layer below the last. [default: 1]"),
    warmup_steps=_of_job(help="Steps in which the learning rate rises."),
    clip_norm=_of_job(help="Largest norm of the gradient."),
    max_ratio=_of_job(help="Largest ratio of a plan, and of steps out of memory. [default: 0.95]"),
    strict=_of_job(help="End when a step is out of memory, not change it. [default: no]"),
    metric=_of_job(help="Figure that chooses the best weights. [default: the data set's]"),
    patience=_of_job(help="Evaluations without a better one that end the run."),
    evaluate_every=_of_job(help="Steps between evaluations."),
    save_every=_of_job(help="Steps between checkpoints. [default: every evaluation]"),
    keep_checkpoints=_of_job(help="Keep the checkpoints of a finished run. [default: no]"),
    compile=_of_job(help="Compile training steps, which pays off in long runs. [default: no]"),
    cuda_graphs=_of_job(help="Capture forward and backward passes as CUDA graphs. [default: no]"),
    activation_memory_budget=_of_job(
        help="Share of activations that compiled steps keep, in (0, 1]. [default: 1]"
    ),
    image_column=_of_data(help="Column of image paths. [default: detected]"),
    text_column=_of_data(help="Column of texts, or two: a,b. [default: detected]"),
    label_column=_of_data(help="Column of labels. [default: detected]"),
    split=_of_data(help="Splits to use: train,validation,test. [default: detected]"),
    validation=_of_data(
        help="Share put aside of the training rows, if there is no validation. [default: 0.1]"
    ),
    skip_bad=_of_data(help="Leave bad rows out instead of refusing them. [default: no]"),
    streaming=_of_data(
        help="Read rows as they come, if they fit neither memory nor disk. [default: no]"
    ),
    seed=_of_job(help="Seed of the classifier, the data order and the draws."),
)
OF_DATA = (
    *("image_column", "text_column", "label_column", "split", "validation", "skip_bad"),
    "streaming",
)
RECIPE = _typed(
    Recipe,
    method=_of_recipe(
        help="Method by name; `razorctl list methods` shows them.",
        autocompletion=completes("methods"),
    ),
    ratio=_of_recipe(help="Share that is pruned, in [0, 1); for razor, share of bytes."),
    joint_budget=_of_recipe(help="Share of blocks that get a gradient in a step, in (0, 1]."),
    joint=_of_recipe(
        help="Blocks of the joint budget: weights, or branches, which suit text encoders. "
        "[default: weights]"
    ),
    attention=_of_recipe(help="stored, flash or sparse-flash. [default: the method's]"),
    mean_correction=_of_recipe(help="Save each column's mean exactly and prune only the rest."),
    unbiased=_of_recipe(
        help="Scale the gradients of drawn columns and blocks by 1 / p. [default: the method's]"
    ),
    int8_weight_grad=_of_recipe(
        help="Compute weight gradients of linear layers in int8. [default: the method's]"
    ),
    int8_input_grad=_of_recipe(
        help="Compute input gradients of linear layers in int8. [default: the method's]"
    ),
    int8_forward=_of_recipe(
        help="Compute outputs of linear layers in int8 too, in training; it cost no accuracy in "
        "fine-tuning. [default: no]"
    ),
    activation_checkpointing=_of_recipe(
        help="Run the model's own activation checkpointing with the method. [default: no]"
    ),
    lora=_of_recipe(help="Train LoRA adapters and the classifier alone. [default: no]"),
)
PLANNING: dict[str, Any] = {
    "vram": Annotated[str | None, of_plan(help="Memory that may be used, such as 11GB.")],
    "gpu": Annotated[
        str | None,
        of_plan(
            help="Name or file of a GPU preset. [default: detected]",
            autocompletion=completes("gpus"),
        ),
    ],
    "prefer": Annotated[str | None, of_plan(help="balanced, exact or fast. [default: balanced]")],
}
SETTINGS = PLANNING | RECIPE | JOB

Preset = Annotated[
    str | None,
    _of_recipe(
        "--recipe",
        help="Name or file of a recipe preset; `razorctl list recipes` shows the names.",
        autocompletion=completes("recipes"),
    ),
]
Finished = Annotated[
    Path, typer.Argument(metavar="RUN", help="Directory of a finished run.", show_default=False)
]
Weights = Annotated[
    str | None,
    option(help="best or last: those of the run's best or last evaluation. [default: best]"),
]
Batch = Annotated[int | None, option(help="Examples in a batch. [default: the run's]", min=1)]
Device = Annotated[str | None, option(help="cpu, cuda or cuda:N. [default: cuda if any]")]
Json = Annotated[bool, option("--json", help="Print one JSON document.")]


def takes(*names: str) -> Callable[[Command], Command]:
    """Adds the options of the named settings to a command that ends in `**flags`.

    A setting that is already a parameter of the command is left as the command declares it.
    """

    def with_options(command: Command) -> Command:
        *own, _ = signature(command).parameters.values()
        named = {parameter.name for parameter in own}
        options = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=SETTINGS[name])
            for name in names
            if name not in named
        ]
        command.__dict__["__signature__"] = Signature([*own, *options])
        return command

    return with_options
