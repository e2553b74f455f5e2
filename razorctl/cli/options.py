"""The options that commands share: each has a setting, a help text and a panel.

`JOB` and `RECIPE` map fields of `Job` and `Recipe` to an option of the field's type; `PLANS` has
the options of a plan. An option without a value is None: its default comes from the dataclass, the
model or the method, and the help names it. A metavar is a noun in capitals, or the choices.
"""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import MISSING, fields
from functools import partial
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from rich.markup import escape

from razorctl.cli.command import option as option
from razorctl.cli.command import switch as switch
from razorctl.cli.names import completion
from razorctl.cli.predicting import NEW_TOKENS
from razorctl.cli.settings import AUTO
from razorctl.config.job import Job
from razorctl.config.keywords import RecipeSettings, TrainingSettings
from razorctl.config.recipe import Recipe
from razorctl.config.settings import types_in

Command = Callable[..., Any]


# The panels of `--help`, each of at most twelve options.
plan_option = partial(option, rich_help_panel="Planning")
_recipe = partial(option, rich_help_panel="Recipe")
_lora = partial(option, rich_help_panel="LoRA")
_optimizer = partial(option, rich_help_panel="Optimizer")
_training = partial(option, rich_help_panel="Training")
_of_task = partial(option, rich_help_panel="Embeddings and detection")
_detection = partial(option, rich_help_panel="Detection")
evaluation_option = partial(option, rich_help_panel="Evaluations and checkpoints")
machine_option = partial(option, rich_help_panel="Machine")
_data = partial(option, rich_help_panel="Your own data")
BY_MODEL, BY_METHOD = "by model", "by method"


def argument(help: str, metavar: str, names: str | None = None) -> Any:
    """An argument; names: the group of names that the shell completes."""
    return typer.Argument(
        help=help, metavar=metavar, autocompletion=None if names is None else completion(names)
    )


def _batch_size(text: str) -> int | str:
    if text == AUTO:
        return text
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is neither a whole number nor {AUTO}.") from None


def _typed(kind: type[Any], keywords: type[Any], **infos: Any) -> dict[str, Any]:
    """Setting -> its type, annotated with its option.

    kind: Job or Recipe; the help of an option ends with the default of its field, if there is one.
    keywords: the TypedDict of the settings; an option has the first of a setting's types.
    """
    table: dict[str, Any] = {}
    defaults = {field.name: field for field in fields(kind)}
    for name, info in infos.items():
        field, plain = defaults[name], types_in(keywords.__annotations__[name])[0]
        if get_origin(plain) is Literal:
            # The dataclass checks the choice, and its error names the nearest one.
            info.metavar, plain = f"[{'|'.join(get_args(plain))}]", str
        if field.default is not MISSING and field.default is not None:
            info.help += escape(f" [default: {_shown(field.default)}]")
        if info.metavar is None:
            info.metavar = "" if plain is bool else "N"
        table[name] = Annotated[plain | None, info]
    return table


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return "yes" if default else "no"
    return f"{default:g}" if isinstance(default, float) else str(default)


MODEL = argument("Name of a model; `razorctl list` shows them.", "MODEL", "models")
DATASET = argument(
    "Name of a data set, hf:ORG/NAME, or a folder or table of your own.", "DATASET", "data sets"
)
NAMES: dict[str, Any] = {
    "model": Annotated[str | None, MODEL],
    "dataset": Annotated[str | None, DATASET],
}
JOB = NAMES | _typed(
    Job,
    TrainingSettings,
    epochs=_training("Passes over the data, instead of --steps.", BY_MODEL),
    steps=_training("Optimizer steps.", BY_MODEL),
    batch_size=_training(
        "Examples in a step; auto: as many as fit the card in one pass.",
        BY_MODEL,
        "[N|auto]",
        parser=_batch_size,
    ),
    learning_rate=_optimizer(
        "Peak learning rate.", BY_MODEL, "RATE", flag="--lr", envvar="RAZORCTL_LR"
    ),
    optimizer=_optimizer("Optimizer; adamw8bit stores its state in 8 bits.", BY_MODEL),
    weight_decay=_optimizer("Weight decay; biases and norms have none.", BY_MODEL, "RATE"),
    layer_decay=_optimizer(
        "Layer-wise learning rate decay: a factor for each layer below the last.", metavar="FACTOR"
    ),
    momentum=_optimizer("Momentum of SGD.", metavar="FACTOR"),
    schedule=_optimizer("Learning rate schedule after the warmup."),
    warmup_steps=_optimizer("Steps of linear warmup.", BY_MODEL),
    clip_norm=_optimizer("Largest norm of the gradient, which is clipped to it.", metavar="NORM"),
    ema=_optimizer(
        "Decay of an EMA of the weights, which is evaluated and exported.", "none", "DECAY"
    ),
    freeze=_optimizer(
        "Weights to freeze: the embedding and the first N blocks, or names such as a,b.*.",
        "none",
        "[N|NAMES]",
    ),
    optimizer_in_backward=_optimizer("Update weights in the backward pass; frees gradients.", "no"),
    optimizer_state=_optimizer("Place of the AdamW state; host frees GPU memory.", "card"),
    weights=machine_option(
        "Dtype of the weights; updates of bf16 are rounded stochastically.", "fp32"
    ),
    task=_training("Task.", "the data set's"),
    input_size=_training("Side of an image in pixels, or tokens of a text.", "the model's"),
    augment=_training("Augmentation of images; crop also flips, rand is RandAugment.", BY_MODEL),
    mixup=_training("Alpha of mixup; 0 turns it off.", metavar="ALPHA"),
    cutmix=_training("Alpha of cutmix; 0 turns it off.", metavar="ALPHA"),
    label_smoothing=_training("Share of a label spread over all classes.", metavar="SHARE"),
    class_weights=_training(
        "Weights of classes in the loss: balanced (rare classes weigh more), or numbers a,b,c.",
        "all the same",
        "WEIGHTS",
    ),
    pooling=_of_task("Pooling of the token states of a text into its embedding.", BY_MODEL),
    temperature=_of_task(
        "Temperature of the contrastive loss.", "0.05, or learned with images", "T"
    ),
    symmetric=_of_task("Symmetric contrastive loss: second texts also retrieve first texts."),
    scales=_of_task(
        "Sides of images, one drawn for each batch: 480,512,544.", "the input size", "SIZES"
    ),
    from_scratch=_training("Start from random weights, not from pretrained ones."),
    seed=_training("Random seed of the new classifier, the data order and all sampling."),
    metric=evaluation_option(
        "Metric that chooses the best weights, such as f1.", "the data set's", "NAME"
    ),
    patience=evaluation_option("Evaluations without improvement before early stopping.", BY_MODEL),
    evaluate_every=evaluation_option("Steps between evaluations.", BY_MODEL),
    save_every=evaluation_option("Steps between checkpoints.", "every evaluation"),
    keep_checkpoints=evaluation_option("Keep the checkpoints of a finished run."),
    precision=machine_option("Precision of a step; auto: by device."),
    accumulate=machine_option("Gradient accumulation: number of micro-batches in a step."),
    workers=machine_option("Number of data-loading processes.", "8 on CUDA, else 0"),
    processes=machine_option("Processes that share a batch, one per GPU; torchrun sets it."),
    strategy=machine_option("Data parallelism; fsdp also shards weights and optimizer state."),
    strict=machine_option("Stop when out of memory; do not retry with less."),
    compile=machine_option("Run torch.compile: faster in long runs of full, slower with razor."),
    cuda_graphs=machine_option(
        "Capture forward and backward as CUDA graphs, at the cost of fixed shapes, a capture at "
        "the start and up to 19 % of the peak in reserved memory (H100).",
        "on CUDA, if batches have one shape",
    ),
    activation_memory_budget=machine_option(
        "Share of activations that compiled steps store for backward, in (0, 1].", "1", "SHARE"
    ),
    max_ratio=plan_option(
        "Largest ratio that a plan, or a retry after out of memory, may choose.", metavar="SHARE"
    ),
    column=_data(
        "Columns to read by other names: text=title reads title as text.", "their own", "COLUMNS"
    ),
    image_column=_data("Column of image paths.", "detected", "COLUMN"),
    text_column=_data(
        "Column of texts, or two: a,b for a pair, or a prompt and its answer.", "detected", "COLUMN"
    ),
    label_column=_data(
        "Column of labels, tags, masks or boxes; for multi-label also several of 0 and 1: a,b.",
        "detected",
        "COLUMN",
    ),
    mask_values=_data(
        "Mask values that are classes: 0,255=car, or 0-20.", "all that occur", "VALUES"
    ),
    mask_colors=_data("Mask colors that are classes: 000000,ff0000=car.", "none", "COLORS"),
    box_format=_data("Order of the numbers of a box in tables.", "detected"),
    split=_data("Names of the splits to use: train,validation,test.", "detected", "NAMES"),
    validation=_data(
        "Share of training rows to hold out if the data have no validation split.", "0.1", "SHARE"
    ),
    max_rows=_data(
        "Largest number of training rows, drawn with the seed; rows are held out before.", "all"
    ),
    skip_bad=_data("Leave out bad rows instead of stopping at them."),
    packing=_data(
        "Pack several conversations or short texts into one sequence.",
        "if it shortens an epoch of conversations by a fifth",
    ),
)
RECIPE = _typed(
    Recipe,
    RecipeSettings,
    method=_recipe(
        "Method; `razorctl list methods` shows all.",
        metavar="NAME",
        autocompletion=completion("methods"),
    ),
    ratio=_recipe(
        "Share of activations (razor: of their bytes) to prune, in [0, 1).", metavar="SHARE"
    ),
    joint_budget=_recipe(
        "Share of parameter blocks that get a gradient in a step, in (0, 1].", metavar="SHARE"
    ),
    joint=_recipe("Blocks that the joint budget samples; branches suit text encoders."),
    attention=_recipe("What attention stores for backward; auto: by method."),
    mean_correction=_recipe("Store the mean of each column exactly, and prune the rest."),
    unbiased=_recipe("Scale the gradients of sampled columns and blocks by 1 / p.", "no"),
    int8_weight_grad=_recipe("Compute weight gradients of linear layers in int8.", BY_METHOD),
    int8_input_grad=_recipe("Compute input gradients of linear layers in int8.", BY_METHOD),
    int8_forward=_recipe(
        "Compute the forward pass of linear layers in int8; it cost no accuracy in tests."
    ),
    activation_checkpointing=_recipe("Also use the model's own activation checkpointing."),
    lora=_lora("Train only LoRA adapters and the classifier."),
    lora_rank=_lora("Rank of the LoRA adapters.", metavar="N"),
    lora_alpha=_lora("Alpha; adapters are scaled by alpha / rank.", "2 x rank", "NUMBER"),
    lora_targets=_lora(
        "Linear layers that get adapters, such as q_proj,v_proj.", "all but the head", "NAMES"
    ),
)
PLANS: dict[str, Any] = {
    "vram": plan_option("GPU memory to use, such as 11GB.", "all free memory", "SIZE"),
    "gpu": plan_option(
        "Name or file of a GPU preset.", "detected", "NAME", autocompletion=completion("gpus")
    ),
    "prefer": plan_option(
        "exact: exact gradients only; balanced: also close ones, if 5 % faster; fast: any.",
        "balanced",
        "[exact|balanced|fast]",
    ),
    "host_memory": plan_option(
        "Host memory that the optimizer state may take.",
        "this machine's, or any with --gpu",
        "SIZE",
    ),
}
PLANS = {name: Annotated[str | None, info] for name, info in PLANS.items()}
SETTINGS = PLANS | RECIPE | JOB
UNPLANNED = {"batch_size": Annotated[int | None, _training("Examples in a step.", BY_MODEL, "N")]}

Preset = Annotated[
    str | None,
    _recipe(
        "Name or file of a recipe preset; `razorctl list recipes` shows the names.",
        "none",
        "NAME",
        flag="--recipe",
        autocompletion=completion("recipes"),
    ),
]
RunArgument = Annotated[Path, argument("Directory of a finished run.", "RUN")]
Weights = Annotated[
    str | None, option("Weights of the run's best or last evaluation.", "best", "[best|last]")
]
Batch = Annotated[int | None, option("Examples in a batch.", "the run's", "N", min=1)]
Device = Annotated[
    str | None, machine_option("Device to run on.", "cuda if any, else cpu", "[cpu|cuda|cuda:N]")
]
NewTokens = Annotated[
    int | None, option("Largest number of new tokens for a text.", str(NEW_TOKENS), "N", min=1)
]
Temperature = Annotated[
    float | None,
    option("Sampling temperature; 0 takes the most probable token.", "0", "T", min=0),
]
DrawSeed = Annotated[int | None, option("Random seed of sampling.", "0", "N", min=0, max=2**32 - 1)]
Threshold = Annotated[
    float | None, _detection("Lowest score of an object.", "0.5", "SCORE", min=0, max=1)
]
Draw = Annotated[
    Path | None, _detection("New directory for images with their boxes.", "none", "DIR")
]
Json = Annotated[bool, switch("--json", "Print one JSON document.")]


def with_options(
    *names: str, first: Sequence[str] = (), planned: bool = True, listed: bool = False
) -> Callable[[Command], Command]:
    """Adds the options of settings to a command that ends in `**flags`.

    A parameter that the command declares itself stays as it is.

    Args:
        names: settings of SETTINGS.
        first: parameters that `--help` shows first, in this order and outside the panels.
        planned: whether a plan may choose the batch size.
        listed: whether a number may be a list: `a,b`.
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
    """The annotation of an option, which becomes a text if it is a number."""
    plain, info = get_args(annotation)
    return Annotated[str | None, info] if {int, float} & {*get_args(plain)} else annotation


def _without_panel(parameter: Parameter) -> Parameter:
    """A copy of a parameter whose option is in no panel."""
    plain, info = get_args(parameter.annotation)
    info = copy(info)
    info.rich_help_panel = None
    return parameter.replace(annotation=Annotated[plain, info], kind=Parameter.KEYWORD_ONLY)
