"""Every option that commands share, once: the setting it sets, what its help says, its panel.

`JOB` and `RECIPE` have an option for each field of these, of the field's type, `PLANNING` those
that say what to plan for. None has a default: what is not given is None, and the default is the
dataclass's, the model's or the method's to know.
"""

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, Literal, get_origin

import typer
from rich.markup import escape

from razorctl.cli.names import completes
from razorctl.job import Job
from razorctl.recipe import Recipe

Command = Callable[..., None]


def option(*flags: str, help: str, **settings: Any) -> Any:
    """An option of typer whose help is shown as it is written."""
    # Or rich would take "[default: 1]" for markup, and show nothing of it.
    return typer.Option(*flags, help=escape(help), show_envvar=False, **settings)


_of_job = partial(option, rich_help_panel="Job")
_of_recipe = partial(option, rich_help_panel="Recipe")
of_plan = partial(option, rich_help_panel="Planning")


def _typed(kind: type[Any], **infos: Any) -> dict[str, Any]:
    """The fields of a dataclass that have an option, by name: their types, annotated with it."""
    types = {field.name: field.type for field in fields(kind)}
    table: dict[str, Any] = {}
    for name, info in infos.items():
        # A dataclass names its choices, and the nearest one, better than a parser would.
        plain: Any = str if get_origin(types[name]) is Literal else types[name]
        table[name] = Annotated[plain | None, info]
    return table


MODEL = typer.Argument(
    help="Name of a model; `razorctl list` shows them.", autocompletion=completes("models")
)
JOB = _typed(
    Job,
    model=MODEL,
    dataset=typer.Argument(help="Name of a data set.", autocompletion=completes("data sets")),
    steps=_of_job(help="Optimizer steps."),
    epochs=_of_job(help="Passes over the data, not steps."),
    input_size=_of_job(help="Pixels of an image's side, or tokens. [default: the model's]"),
    batch_size=_of_job(help="Examples in a step."),
    accumulate=_of_job(help="Micro-batches that a step's gradient adds up over. [default: 1]"),
    precision=_of_job(help="fp32, bf16 or fp16. [default: what suits the device]"),
    optimizer=_of_job("--optimizer", help="sgd or adamw. [default: sgd]"),
    learning_rate=_of_job("--lr", help="Highest learning rate."),
    momentum=_of_job(help="Of SGD."),
    weight_decay=_of_job(help="Of the optimizer."),
    warmup_steps=_of_job(help="Steps of rising learning rate."),
    clip_norm=_of_job(help="Largest norm of the gradient."),
    evaluate_every=_of_job(help="Steps between evaluations."),
    seed=_of_job(help="Of classifier, data order and draws."),
)
RECIPE = _typed(
    Recipe,
    method=_of_recipe(
        help="What survives of each activation.", autocompletion=completes("methods")
    ),
    ratio=_of_recipe(help="Share that is pruned; of razor, of bytes; in [0, 1)."),
    joint_budget=_of_recipe(help="Share of blocks with a gradient each step, in (0, 1]."),
    joint=_of_recipe(help="Those blocks: weights or branches. [default: weights]"),
    attention=_of_recipe(help="stored, flash or sparse-flash. [default: the method's]"),
    mean_correction=_of_recipe(help="Save the mean of each column exactly, prune only the rest."),
    unbiased=_of_recipe(
        help="Scale the gradients of drawn columns and blocks by 1 / p. [default: the method's]"
    ),
    int8_weight_grad=_of_recipe(
        help="Weight gradients of linear layers in int8. [default: the method's]"
    ),
    int8_input_grad=_of_recipe(
        help="Input gradients of linear layers in int8. [default: the method's]"
    ),
)
PLANNING: dict[str, Any] = {
    "vram": Annotated[str | None, of_plan(help="Memory that may be used, such as 11GB.")],
    "gpu": Annotated[
        str | None,
        of_plan(
            help="A card by its preset's name or file. [default: detected]",
            autocompletion=completes("gpus"),
        ),
    ],
    "prefer": Annotated[str | None, of_plan(help="balanced, exact or fast. [default: balanced]")],
    "max_ratio": Annotated[
        float | None, of_plan(help="Largest ratio that may be planned. [default: 0.95]")
    ],
}
SETTINGS = PLANNING | RECIPE | JOB

Preset = Annotated[
    str | None,
    _of_recipe(
        "--recipe",
        help="Settings by a preset's name; `razorctl list recipes` shows them.",
        autocompletion=completes("recipes"),
    ),
]
Device = Annotated[str | None, option(help="cpu, cuda or cuda:N. [default: cuda if any]")]
Json = Annotated[bool, option("--json", help="Print one JSON document.")]


def takes(*names: str) -> Callable[[Command], Command]:
    """Gives a command that ends in `**flags` the options of these settings, by name.

    Those that it names itself, as with a default of its own, are left to it.
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
