"""The options that commands share: each has a setting, a help text and a panel.

`JOB` and `RECIPE` map fields of `Job` and `Recipe` to an option of the field's type; `PLANNING`
holds the options that say what to plan for. No option has a default: one that is not given is
None, and the dataclass, the model or the method supplies the value, which the help names. What an
option takes is a noun in capitals, or its choices.
"""

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import MISSING, fields
from functools import partial
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from rich.markup import escape

from razorctl.cli.command import option as option
from razorctl.cli.names import completion
from razorctl.cli.settings import AUTO
from razorctl.job import AUGMENT, Job, OptimizerName
from razorctl.recipe import Recipe
from razorctl.tasks import TASKS

Command = Callable[..., None]


# The panels of `--help`, each of at most twelve options.
plan_option = partial(option, rich_help_panel="Planning")
_recipe_option = partial(option, rich_help_panel="Recipe")
_optimizer_option = partial(option, rich_help_panel="Optimizer")
_learning_option = partial(option, rich_help_panel="What is learned")
evaluation_option = partial(option, rich_help_panel="Evaluations and checkpoints")
machine_option = partial(option, rich_help_panel="Machine")
_data_option = partial(option, rich_help_panel="Data of one's own")
BY_MODEL, BY_METHOD = "by model", "by method"


def _batch_size(text: str) -> int | str:
    if text == AUTO:
        return text
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is neither a whole number nor {AUTO}.") from None


def _typed(kind: type[Any], **infos: Any) -> dict[str, Any]:
    """Field name -> the field's type annotated with its option, for the fields in `infos`.

    The help of an option has the field's default, unless it names one already.
    """
    table: dict[str, Any] = {}
    for field in fields(kind):
        if field.name not in infos:
            continue
        info: Any = infos[field.name]
        plain: Any = field.type
        if get_origin(plain) is Literal:
            # The dataclass checks choices itself: its error also names the nearest one.
            info.metavar, plain = choices(get_args(plain)), str
        if field.default is not MISSING and field.default is not None:
            info.help += escape(f" [default: {_shown(field.default)}]")
        if info.metavar is None:
            info.metavar = "" if plain in (bool, bool | None) else "N"
        table[field.name] = Annotated[plain | None, info]
    return {name: table[name] for name in infos}


def choices(names: Iterable[str]) -> str:
    """The metavar of an option that takes one of these."""
    return f"[{'|'.join(names)}]"


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return "yes" if default else "no"
    return f"{default:g}" if isinstance(default, float) else str(default)


MODEL = typer.Argument(
    help="Name of a model; `razorctl list` shows them.",
    metavar="MODEL",
    autocompletion=completion("models"),
)
DATASET = typer.Argument(
    help="Name of a data set, hf:ORG/NAME, or a folder or table of one's own.",
    metavar="DATASET",
    autocompletion=completion("data sets"),
)
JOB = _typed(
    Job,
    model=MODEL,
    dataset=DATASET,
    epochs=_learning_option(help="Passes over the data, instead of --steps.", default=BY_MODEL),
    steps=_learning_option(help="Optimizer steps.", default=BY_MODEL),
    batch_size=_learning_option(
        help="Examples in a step; auto is the most that a plan allows in one pass.",
        default=BY_MODEL,
        parser=_batch_size,
        metavar="[N|auto]",
    ),
    learning_rate=_optimizer_option(
        "--lr",
        envvar="RAZORCTL_LR",
        help="Highest learning rate.",
        default=BY_MODEL,
        metavar="RATE",
    ),
    optimizer=_optimizer_option(
        "--optimizer",
        help="The optimizer; adamw8bit keeps its state in 8 bits.",
        default=BY_MODEL,
        metavar=choices(get_args(OptimizerName)),
    ),
    weight_decay=_optimizer_option(
        help="Weight decay, which biases and norms do without.", default=BY_MODEL, metavar="RATE"
    ),
    layer_decay=_optimizer_option(
        help="Factor of the learning rate per layer below the last.", metavar="FACTOR"
    ),
    momentum=_optimizer_option(help="Momentum of SGD.", metavar="FACTOR"),
    warmup_steps=_optimizer_option(
        help="Steps in which the learning rate rises.", default=BY_MODEL
    ),
    clip_norm=_optimizer_option(help="Largest norm of the gradient.", metavar="NORM"),
    optimizer_in_backward=_optimizer_option(help="Update each weight once its gradient is there."),
    weights=_optimizer_option(help="Dtype of the weights; bf16 is rounded at random."),
    task=_learning_option(help="What to learn.", default="the data set's", metavar=choices(TASKS)),
    input_size=_learning_option(
        help="Pixels of an image's side, or tokens of a text.", default="the model's"
    ),
    augment=_learning_option(
        help="Of training images; crop flips too, rand is RandAugment.",
        default=BY_MODEL,
        metavar=choices(AUGMENT),
    ),
    mixup=_learning_option(help="Alpha of mixup; 0 is none.", metavar="ALPHA"),
    cutmix=_learning_option(help="Alpha of cutmix; 0 is none.", metavar="ALPHA"),
    label_smoothing=_learning_option(
        help="Share of a label spread over all classes.", metavar="SHARE"
    ),
    from_scratch=_learning_option(help="Begin with random weights, not pretrained ones."),
    seed=_learning_option(help="Seed of the classifier, the data order and the draws."),
    metric=evaluation_option(
        help="Figure that chooses the best weights.", default="the data set's", metavar="NAME"
    ),
    patience=evaluation_option(
        help="Evaluations without a better one that end the run.", default=BY_MODEL
    ),
    evaluate_every=evaluation_option(help="Steps between evaluations.", default=BY_MODEL),
    save_every=evaluation_option(help="Steps between checkpoints.", default="every evaluation"),
    keep_checkpoints=evaluation_option(help="Keep the checkpoints of a finished run."),
    precision=machine_option(help="Precision of a step; auto is what suits the device."),
    accumulate=machine_option(help="Micro-batches accumulated in a step."),
    processes=machine_option(help="Processes that share a batch, one per GPU; torchrun sets it."),
    strategy=machine_option(help="Of several processes: fsdp shards weights and state."),
    strict=machine_option(help="End when a step is out of memory, not change it."),
    compile=machine_option(help="Compile training steps, which pays off in long runs."),
    cuda_graphs=machine_option(help="Capture forward and backward passes as CUDA graphs."),
    activation_memory_budget=machine_option(
        help="Share of activations that compiled steps keep, in (0, 1].",
        default="1",
        metavar="SHARE",
    ),
    max_ratio=plan_option(
        help="Largest ratio of a plan, and of steps out of memory.", metavar="SHARE"
    ),
    image_column=_data_option(help="Column of image paths.", default="detected", metavar="COLUMN"),
    text_column=_data_option(
        help="Column of texts, or two: a,b.", default="detected", metavar="COLUMN"
    ),
    label_column=_data_option(help="Column of labels.", default="detected", metavar="COLUMN"),
    split=_data_option(
        help="Splits to use: train,validation,test.", default="detected", metavar="NAMES"
    ),
    validation=_data_option(
        help="Share put aside of the training rows, if there is no validation.",
        default="0.1",
        metavar="SHARE",
    ),
    skip_bad=_data_option(help="Leave bad rows out instead of refusing them."),
    streaming=_data_option(help="Read rows as they come, if they fit neither memory nor disk."),
)
OF_DATA = (
    *("image_column", "text_column", "label_column", "split", "validation", "skip_bad"),
    "streaming",
)
RECIPE = _typed(
    Recipe,
    method=_recipe_option(
        help="Method by name; `razorctl list methods` shows them.",
        metavar="NAME",
        autocompletion=completion("methods"),
    ),
    ratio=_recipe_option(
        help="Share that is pruned, in [0, 1); for razor, share of bytes.", metavar="SHARE"
    ),
    joint_budget=_recipe_option(
        help="Share of blocks that get a gradient in a step, in (0, 1].", metavar="SHARE"
    ),
    joint=_recipe_option(help="Blocks of the joint budget; branches suit text encoders."),
    attention=_recipe_option(help="What attention keeps; auto is what suits the method."),
    mean_correction=_recipe_option(help="Keep each column's mean exactly and prune only the rest."),
    unbiased=_recipe_option(
        help="Scale the gradients of drawn columns and blocks by 1 / p.", default=BY_METHOD
    ),
    int8_weight_grad=_recipe_option(
        help="Compute weight gradients of linear layers in int8.", default=BY_METHOD
    ),
    int8_input_grad=_recipe_option(
        help="Compute input gradients of linear layers in int8.", default=BY_METHOD
    ),
    int8_forward=_recipe_option(
        help="Compute outputs of linear layers in int8 too, in training; it cost no accuracy in "
        "fine-tuning."
    ),
    activation_checkpointing=_recipe_option(
        help="Run the model's own activation checkpointing with the method."
    ),
    lora=_recipe_option(help="Train LoRA adapters and the classifier alone."),
)
PLANNING: dict[str, Any] = {
    "vram": Annotated[
        str | None,
        plan_option(
            help="Memory that may be used, such as 11GB.",
            default="all that is free",
            metavar="SIZE",
        ),
    ],
    "gpu": Annotated[
        str | None,
        plan_option(
            help="Name or file of a GPU preset.",
            default="detected",
            metavar="NAME",
            autocompletion=completion("gpus"),
        ),
    ],
    "prefer": Annotated[
        str | None,
        plan_option(
            help="Exact gradients alone, or approximate ones that pay, or the fastest way.",
            default="balanced",
            metavar="[exact|balanced|fast]",
        ),
    ],
}
SETTINGS = PLANNING | RECIPE | JOB
UNPLANNED = {
    "batch_size": Annotated[
        int | None, _learning_option(help="Examples in a step.", default=BY_MODEL, metavar="N")
    ]
}

Preset = Annotated[
    str | None,
    _recipe_option(
        "--recipe",
        help="Name or file of a recipe preset; `razorctl list recipes` shows the names.",
        default="none",
        metavar="NAME",
        autocompletion=completion("recipes"),
    ),
]
Finished = Annotated[
    Path, typer.Argument(metavar="RUN", help="Directory of a finished run.", show_default=False)
]
Weights = Annotated[
    str | None,
    option(
        help="Those of the run's best or last evaluation.", default="best", metavar="[best|last]"
    ),
]
Batch = Annotated[
    int | None, option(help="Examples in a batch.", default="the run's", metavar="N", min=1)
]
Device = Annotated[
    str | None,
    machine_option(
        help="Where it runs.", default="cuda if any, else cpu", metavar="[cpu|cuda|cuda:N]"
    ),
]
Json = Annotated[bool, option("--json", help="Print one JSON document.", metavar="")]


def with_options(
    *names: str, first: Sequence[str] = (), planned: bool = True
) -> Callable[[Command], Command]:
    """Adds the options of the named settings to a command that ends in `**flags`.

    A setting that is already a parameter of the command is left as the command declares it.
    first: the parameters that `--help` shows first, in this order, without a panel of their own.
    planned: whether a plan may choose the batch size.
    """
    settings = SETTINGS if planned else SETTINGS | UNPLANNED

    def add_options(command: Command) -> Command:
        *own, _ = signature(command).parameters.values()
        known = {parameter.name: parameter for parameter in own}
        for name in names:
            if name not in known:
                known[name] = Parameter(
                    name, Parameter.KEYWORD_ONLY, default=None, annotation=settings[name]
                )
        ahead = [_unpaneled(known.pop(name)) for name in first]
        rest = [each.replace(kind=Parameter.KEYWORD_ONLY) for each in known.values()]
        command.__dict__["__signature__"] = Signature([*ahead, *rest])
        return command

    return add_options


def _unpaneled(parameter: Parameter) -> Parameter:
    """A parameter whose option is in no panel."""
    plain, info = get_args(parameter.annotation)
    info = copy(info)
    info.rich_help_panel = None
    kind = Parameter.KEYWORD_ONLY
    return parameter.replace(annotation=Annotated[plain, info], kind=kind)
