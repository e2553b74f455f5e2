"""The options that commands share: each has a setting, a help text and a panel.

`JOB` and `RECIPE` map fields of `Job` and `Recipe` to an option of the field's type; `PLANNING`
has the options that say what to plan for. An option that is not given is None: its default comes
from the dataclass, the model or the method, and the help names it. A metavar is a noun in capitals,
or the choices.
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
from razorctl.config.job import AUGMENT, Job, OptimizerName
from razorctl.config.recipe import Recipe
from razorctl.config.tasks import TASKS

Command = Callable[..., Any]


# The panels of `--help`, each of at most twelve options.
plan_option = partial(option, rich_help_panel="Planning")
_recipe_option = partial(option, rich_help_panel="Recipe")
_lora_option = partial(option, rich_help_panel="LoRA")
_optimizer_option = partial(option, rich_help_panel="Optimizer")
_learning_option = partial(option, rich_help_panel="Training")
evaluation_option = partial(option, rich_help_panel="Evaluations and checkpoints")
machine_option = partial(option, rich_help_panel="Machine")
_data_option = partial(option, rich_help_panel="Your own data")
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

    The help of an option ends with the field's default, if it has one.
    """
    table: dict[str, Any] = {}
    kinds = {field.name: field for field in fields(kind)}
    for name, info in infos.items():
        field = kinds[name]
        plain: Any = field.type
        if get_origin(plain) is Literal:
            # The dataclass checks choices: its error names the nearest one.
            info.metavar, plain = choices(get_args(plain)), str
        if field.default is not MISSING and field.default is not None:
            info.help += escape(f" [default: {_shown(field.default)}]")
        if info.metavar is None:
            info.metavar = "" if plain in (bool, bool | None) else "N"
        table[name] = Annotated[plain | None, info]
    return table


def choices(names: Iterable[str]) -> str:
    """The metavar of an option that takes one of the names."""
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
    help="Name of a data set, hf:ORG/NAME, or a folder or table of your own.",
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
        help="Examples in a step; auto: as many as fit the card in one pass.",
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
        help="Optimizer; adamw8bit keeps its state in 8 bits.",
        default=BY_MODEL,
        metavar=choices(get_args(OptimizerName)),
    ),
    weight_decay=_optimizer_option(
        help="Weight decay, of all but biases and norms.", default=BY_MODEL, metavar="RATE"
    ),
    layer_decay=_optimizer_option(
        help="Factor of the learning rate per layer below the last.", metavar="FACTOR"
    ),
    momentum=_optimizer_option(help="Momentum of SGD.", metavar="FACTOR"),
    warmup_steps=_optimizer_option(help="Steps of rising learning rate.", default=BY_MODEL),
    clip_norm=_optimizer_option(help="Norm that the gradient is clipped to.", metavar="NORM"),
    ema=_optimizer_option(
        help="Decay of an average of the weights, which is evaluated and exported.",
        default="none",
        metavar="DECAY",
    ),
    freeze=_optimizer_option(
        help="Weights to freeze: the first N blocks and what is before them, or names: a,b.*.",
        default="none",
        metavar="[N|NAMES]",
    ),
    optimizer_in_backward=_optimizer_option(help="Update a weight as soon as it has a gradient."),
    weights=_optimizer_option(help="Dtype of the weights; bf16 is rounded stochastically."),
    task=_learning_option(help="Task.", default="the data set's", metavar=choices(TASKS)),
    input_size=_learning_option(
        help="Side of an image in pixels, or tokens of a text.", default="the model's"
    ),
    augment=_learning_option(
        help="Augmentation of images; crop also flips, rand is RandAugment.",
        default=BY_MODEL,
        metavar=choices(AUGMENT),
    ),
    mixup=_learning_option(help="Alpha of mixup; 0 turns it off.", metavar="ALPHA"),
    cutmix=_learning_option(help="Alpha of cutmix; 0 turns it off.", metavar="ALPHA"),
    label_smoothing=_learning_option(
        help="Share of a label spread over all classes.", metavar="SHARE"
    ),
    class_weights=_learning_option(
        help="Weights of classes in the loss: balanced (the rarer, the more), or numbers a,b,c.",
        default="all the same",
        metavar="WEIGHTS",
    ),
    from_scratch=_learning_option(help="Start from random weights, not from pretrained ones."),
    seed=_learning_option(help="Seed of the classifier, the data order and all draws."),
    metric=evaluation_option(
        help="Figure of evaluations that chooses the best weights, such as f1.",
        default="the data set's",
        metavar="NAME",
    ),
    patience=evaluation_option(
        help="Evaluations without improvement that end the run.", default=BY_MODEL
    ),
    evaluate_every=evaluation_option(help="Steps between evaluations.", default=BY_MODEL),
    save_every=evaluation_option(help="Steps between checkpoints.", default="every evaluation"),
    keep_checkpoints=evaluation_option(help="Keep the checkpoints of a finished run."),
    precision=machine_option(help="Precision of a step; auto: by device."),
    accumulate=machine_option(help="Micro-batches of a step, whose gradients accumulate."),
    workers=machine_option(help="Processes that load rows.", default="8 on CUDA, else 0"),
    processes=machine_option(help="Processes that share a batch, one per GPU; torchrun sets it."),
    strategy=machine_option(help="How processes share a model; fsdp shards weights and state."),
    strict=machine_option(help="Stop, instead of adapting steps, when out of memory."),
    compile=machine_option(help="Compile training steps; it pays off in long runs."),
    cuda_graphs=machine_option(help="Capture forward and backward passes as CUDA graphs."),
    activation_memory_budget=machine_option(
        help="Share of activations that compiled steps keep, in (0, 1].",
        default="1",
        metavar="SHARE",
    ),
    max_ratio=plan_option(
        help="Largest ratio to choose, in plans and when out of memory.", metavar="SHARE"
    ),
    image_column=_data_option(help="Column of image paths.", default="detected", metavar="COLUMN"),
    text_column=_data_option(
        help="Column of texts, or two: a,b.", default="detected", metavar="COLUMN"
    ),
    label_column=_data_option(
        help="Column of labels; several of 0 and 1 are several labels: a,b.",
        default="detected",
        metavar="COLUMN",
    ),
    mask_values=_data_option(
        help="Values of masks that are classes: 0,255=car, or 0-20.",
        default="those that occur",
        metavar="VALUES",
    ),
    mask_colors=_data_option(
        help="Colors of masks that are classes: 000000,ff0000=car.",
        default="none",
        metavar="COLORS",
    ),
    split=_data_option(
        help="Splits to use: train,validation,test.", default="detected", metavar="NAMES"
    ),
    validation=_data_option(
        help="Share of training rows to hold out, without a validation split.",
        default="0.1",
        metavar="SHARE",
    ),
    skip_bad=_data_option(help="Leave out bad rows instead of stopping at them."),
    streaming=_data_option(help="Refused: see `data.of`.", hidden=True),
    packing=_data_option(
        help="Pack several conversations, or short texts, into a sequence.",
        default="if an epoch of conversations gets a fifth shorter",
    ),
)
DATA_SETTINGS = (
    *("image_column", "text_column", "label_column", "mask_values", "mask_colors"),
    *("split", "validation", "skip_bad", "streaming"),
)
RECIPE = _typed(
    Recipe,
    method=_recipe_option(
        help="Method; `razorctl list methods` shows all.",
        metavar="NAME",
        autocompletion=completion("methods"),
    ),
    ratio=_recipe_option(
        help="Share of activations to prune, in [0, 1); for razor, of their bytes.",
        metavar="SHARE",
    ),
    joint_budget=_recipe_option(
        help="Share of parameter blocks with a gradient in a step, in (0, 1].", metavar="SHARE"
    ),
    joint=_recipe_option(help="Blocks that the joint budget draws; branches suit text encoders."),
    attention=_recipe_option(help="What attention keeps for backward; auto: by method."),
    mean_correction=_recipe_option(help="Keep each column's mean exactly; prune the rest."),
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
        help="Compute outputs of linear layers in int8 in training; it cost no accuracy in tests."
    ),
    activation_checkpointing=_recipe_option(
        help="Also use the model's own activation checkpointing."
    ),
    lora=_lora_option(help="Train only LoRA adapters and the classifier."),
    lora_rank=_lora_option(help="Rank of the LoRA adapters.", metavar="N"),
    lora_alpha=_lora_option(
        help="Factor of the LoRA adapters, times their rank.", default="2 x rank", metavar="NUMBER"
    ),
    lora_targets=_lora_option(
        help="Linear layers that get adapters: q_proj,v_proj or such.",
        default="all but the head",
        metavar="NAMES",
    ),
)
PLANNING: dict[str, Any] = {
    "vram": Annotated[
        str | None,
        plan_option(
            help="Memory to use, such as 11GB.",
            default="all free memory",
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
            help="Exact gradients only, approximate ones if they pay, or the fastest way.",
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
RunArgument = Annotated[
    Path, typer.Argument(metavar="RUN", help="Directory of a finished run.", show_default=False)
]
Weights = Annotated[
    str | None,
    option(
        help="Weights of the run's best or last evaluation.", default="best", metavar="[best|last]"
    ),
]
Batch = Annotated[
    int | None, option(help="Examples in a batch.", default="the run's", metavar="N", min=1)
]
Device = Annotated[
    str | None,
    machine_option(
        help="Device to run on.", default="cuda if any, else cpu", metavar="[cpu|cuda|cuda:N]"
    ),
]
Json = Annotated[bool, option("--json", help="Print one JSON document.", metavar="")]


def with_options(
    *names: str, first: Sequence[str] = (), planned: bool = True, listed: bool = False
) -> Callable[[Command], Command]:
    """Adds the options of the named settings to a command that ends in `**flags`.

    A setting that is already a parameter of the command is left as the command declares it.

    Args:
        names: settings of SETTINGS.
        first: parameters that `--help` shows first, in this order and outside the panels.
        planned: whether a plan may choose the batch size.
        listed: whether a numeric setting may be a list: `a,b`.
    """
    settings = SETTINGS if planned else SETTINGS | UNPLANNED

    def add_options(command: Command) -> Command:
        *declared, _ = signature(command).parameters.values()
        parameters = {parameter.name: parameter for parameter in declared}
        for name in names:
            if name not in parameters:
                annotation = _listed(settings[name]) if listed else settings[name]
                parameters[name] = Parameter(
                    name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation
                )
        ahead = [_without_panel(parameters.pop(name)) for name in first]
        rest = [each.replace(kind=Parameter.KEYWORD_ONLY) for each in parameters.values()]
        command.__dict__["__signature__"] = Signature([*ahead, *rest])
        return command

    return add_options


def _listed(annotation: Any) -> Any:
    """The annotation of an option as text if it is of a number."""
    plain, info = get_args(annotation)
    return Annotated[str | None, info] if {int, float} & {*get_args(plain)} else annotation


def _without_panel(parameter: Parameter) -> Parameter:
    """A copy of a parameter whose option is in no panel."""
    plain, info = get_args(parameter.annotation)
    info = copy(info)
    info.rich_help_panel = None
    return parameter.replace(
        annotation=Annotated[plain, info],
        kind=Parameter.KEYWORD_ONLY,
    )
