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
from razorctl.cli.names import completes
from razorctl.cli.settings import AUTO
from razorctl.job import AUGMENT, Job, OptimizerName
from razorctl.recipe import Recipe
from razorctl.tasks import TASKS

Command = Callable[..., None]


# The panels of `--help`, each of at most twelve options.
of_plan = partial(option, rich_help_panel="Planning")
_of_recipe = partial(option, rich_help_panel="Recipe")
_of_optimizer = partial(option, rich_help_panel="Optimizer")
_of_learning = partial(option, rich_help_panel="What is learned")
of_course = partial(option, rich_help_panel="Evaluations and checkpoints")
of_machine = partial(option, rich_help_panel="Machine")
_of_data = partial(option, rich_help_panel="Data of one's own")
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
    autocompletion=completes("models"),
)
DATASET = typer.Argument(
    help="Name of a data set, hf:ORG/NAME, or a folder or table of one's own.",
    metavar="DATASET",
    autocompletion=completes("data sets"),
)
JOB = _typed(
    Job,
    model=MODEL,
    dataset=DATASET,
    epochs=_of_learning(help="Passes over the data, instead of --steps.", default=BY_MODEL),
    steps=_of_learning(help="Optimizer steps.", default=BY_MODEL),
    batch_size=_of_learning(
        help="Examples in a step; auto is the most that a plan allows in one pass.",
        default=BY_MODEL,
        parser=_batch_size,
        metavar="[N|auto]",
    ),
    learning_rate=_of_optimizer(
        "--lr",
        envvar="RAZORCTL_LR",
        help="Highest learning rate.",
        default=BY_MODEL,
        metavar="RATE",
    ),
    optimizer=_of_optimizer(
        "--optimizer",
        help="The optimizer; adamw8bit keeps its state in 8 bits.",
        default=BY_MODEL,
        metavar=choices(get_args(OptimizerName)),
    ),
    weight_decay=_of_optimizer(
        help="Weight decay, which biases and norms do without.", default=BY_MODEL, metavar="RATE"
    ),
    layer_decay=_of_optimizer(
        help="Factor of the learning rate per layer below the last.", metavar="FACTOR"
    ),
    momentum=_of_optimizer(help="Momentum of SGD.", metavar="FACTOR"),
    warmup_steps=_of_optimizer(help="Steps in which the learning rate rises.", default=BY_MODEL),
    clip_norm=_of_optimizer(help="Largest norm of the gradient.", metavar="NORM"),
    optimizer_in_backward=_of_optimizer(help="Update each weight once its gradient is there."),
    weights=_of_optimizer(help="Dtype of the weights; bf16 is rounded at random."),
    task=_of_learning(help="What to learn.", default="the data set's", metavar=choices(TASKS)),
    input_size=_of_learning(
        help="Pixels of an image's side, or tokens of a text.", default="the model's"
    ),
    augment=_of_learning(
        help="Of training images; crop flips too, rand is RandAugment.",
        default=BY_MODEL,
        metavar=choices(AUGMENT),
    ),
    mixup=_of_learning(help="Alpha of mixup; 0 is none.", metavar="ALPHA"),
    cutmix=_of_learning(help="Alpha of cutmix; 0 is none.", metavar="ALPHA"),
    label_smoothing=_of_learning(help="Share of a label spread over all classes.", metavar="SHARE"),
    from_scratch=_of_learning(help="Begin with random weights, not pretrained ones."),
    seed=_of_learning(help="Seed of the classifier, the data order and the draws."),
    metric=of_course(
        help="Figure that chooses the best weights.", default="the data set's", metavar="NAME"
    ),
    patience=of_course(help="Evaluations without a better one that end the run.", default=BY_MODEL),
    evaluate_every=of_course(help="Steps between evaluations.", default=BY_MODEL),
    save_every=of_course(help="Steps between checkpoints.", default="every evaluation"),
    keep_checkpoints=of_course(help="Keep the checkpoints of a finished run."),
    precision=of_machine(help="Precision of a step; auto is what suits the device."),
    accumulate=of_machine(help="Micro-batches accumulated in a step."),
    processes=of_machine(help="Processes that share a batch, one per GPU; torchrun sets it."),
    strategy=of_machine(help="Of several processes: fsdp shards weights and state."),
    strict=of_machine(help="End when a step is out of memory, not change it."),
    compile=of_machine(help="Compile training steps, which pays off in long runs."),
    cuda_graphs=of_machine(help="Capture forward and backward passes as CUDA graphs."),
    activation_memory_budget=of_machine(
        help="Share of activations that compiled steps keep, in (0, 1].",
        default="1",
        metavar="SHARE",
    ),
    max_ratio=of_plan(help="Largest ratio of a plan, and of steps out of memory.", metavar="SHARE"),
    image_column=_of_data(help="Column of image paths.", default="detected", metavar="COLUMN"),
    text_column=_of_data(
        help="Column of texts, or two: a,b.", default="detected", metavar="COLUMN"
    ),
    label_column=_of_data(help="Column of labels.", default="detected", metavar="COLUMN"),
    split=_of_data(
        help="Splits to use: train,validation,test.", default="detected", metavar="NAMES"
    ),
    validation=_of_data(
        help="Share put aside of the training rows, if there is no validation.",
        default="0.1",
        metavar="SHARE",
    ),
    skip_bad=_of_data(help="Leave bad rows out instead of refusing them."),
    streaming=_of_data(help="Read rows as they come, if they fit neither memory nor disk."),
)
OF_DATA = (
    *("image_column", "text_column", "label_column", "split", "validation", "skip_bad"),
    "streaming",
)
RECIPE = _typed(
    Recipe,
    method=_of_recipe(
        help="Method by name; `razorctl list methods` shows them.",
        metavar="NAME",
        autocompletion=completes("methods"),
    ),
    ratio=_of_recipe(
        help="Share that is pruned, in [0, 1); for razor, share of bytes.", metavar="SHARE"
    ),
    joint_budget=_of_recipe(
        help="Share of blocks that get a gradient in a step, in (0, 1].", metavar="SHARE"
    ),
    joint=_of_recipe(help="Blocks of the joint budget; branches suit text encoders."),
    attention=_of_recipe(help="What attention keeps; auto is what suits the method."),
    mean_correction=_of_recipe(help="Keep each column's mean exactly and prune only the rest."),
    unbiased=_of_recipe(
        help="Scale the gradients of drawn columns and blocks by 1 / p.", default=BY_METHOD
    ),
    int8_weight_grad=_of_recipe(
        help="Compute weight gradients of linear layers in int8.", default=BY_METHOD
    ),
    int8_input_grad=_of_recipe(
        help="Compute input gradients of linear layers in int8.", default=BY_METHOD
    ),
    int8_forward=_of_recipe(
        help="Compute outputs of linear layers in int8 too, in training; it cost no accuracy in "
        "fine-tuning."
    ),
    activation_checkpointing=_of_recipe(
        help="Run the model's own activation checkpointing with the method."
    ),
    lora=_of_recipe(help="Train LoRA adapters and the classifier alone."),
)
PLANNING: dict[str, Any] = {
    "vram": Annotated[
        str | None,
        of_plan(
            help="Memory that may be used, such as 11GB.",
            default="all that is free",
            metavar="SIZE",
        ),
    ],
    "gpu": Annotated[
        str | None,
        of_plan(
            help="Name or file of a GPU preset.",
            default="detected",
            metavar="NAME",
            autocompletion=completes("gpus"),
        ),
    ],
    "prefer": Annotated[
        str | None,
        of_plan(
            help="Exact gradients alone, or approximate ones that pay, or the fastest way.",
            default="balanced",
            metavar="[exact|balanced|fast]",
        ),
    ],
}
SETTINGS = PLANNING | RECIPE | JOB
UNPLANNED = {
    "batch_size": Annotated[
        int | None, _of_learning(help="Examples in a step.", default=BY_MODEL, metavar="N")
    ]
}

Preset = Annotated[
    str | None,
    _of_recipe(
        "--recipe",
        help="Name or file of a recipe preset; `razorctl list recipes` shows the names.",
        default="none",
        metavar="NAME",
        autocompletion=completes("recipes"),
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
    of_machine(help="Where it runs.", default="cuda if any, else cpu", metavar="[cpu|cuda|cuda:N]"),
]
Json = Annotated[bool, option("--json", help="Print one JSON document.", metavar="")]


def takes(
    *names: str, first: Sequence[str] = (), planned: bool = True
) -> Callable[[Command], Command]:
    """Adds the options of the named settings to a command that ends in `**flags`.

    A setting that is already a parameter of the command is left as the command declares it.
    first: the parameters that `--help` shows first, in this order, without a panel of their own.
    planned: whether a plan may choose the batch size.
    """
    settings = SETTINGS if planned else SETTINGS | UNPLANNED

    def with_options(command: Command) -> Command:
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

    return with_options


def _unpaneled(parameter: Parameter) -> Parameter:
    """A parameter whose option is in no panel."""
    plain, info = get_args(parameter.annotation)
    info = copy(info)
    info.rich_help_panel = None
    kind = Parameter.KEYWORD_ONLY
    return parameter.replace(annotation=Annotated[plain, info], kind=kind)
