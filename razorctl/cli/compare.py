"""`razorctl compare`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from razorctl.cli.comparing import METHODS, exist
from razorctl.cli.names import completion
from razorctl.cli.options import (
    JOB,
    Device,
    Json,
    argument,
    evaluation_option,
    machine_option,
    option,
    switch,
    with_options,
)
from razorctl.cli.results import print_result
from razorctl.cli.settings import GIVEN
from razorctl.config.keywords import ComparedSettings
from razorctl.errors import UsageError

JOB_SETTINGS = [name for name in JOB if name in ComparedSettings.__annotations__]
FIRST = (
    *("methods", "seeds", "ratio", "budget", "steps", "epochs"),
    *("out", "resume", "html", "csv", "json"),
)


@with_options("ratio", *JOB_SETTINGS, first=FIRST, planned=False, listed=True)
def compare(
    ctx: typer.Context,
    what: Annotated[
        list[str],
        argument(
            "A model and a data set, or directories of runs and comparisons.",
            "MODEL DATASET | DIR...",
        ),
    ],
    methods: Annotated[
        str, option("Names of methods or baselines (see below).", metavar="NAMES")
    ] = METHODS,
    seeds: Annotated[
        int, option("Number of runs of each method, each with its own seed.", metavar="N")
    ] = 1,
    budget: Annotated[
        str | None, option("Time after which no new run starts, such as 10m.", "none", "TIME")
    ] = None,
    target: Annotated[
        float | None,
        evaluation_option(
            "Score to reach, such as an accuracy of 0.95.", "99 % of the best of full", "SCORE"
        ),
    ] = None,
    vram: Annotated[
        str | None,
        machine_option("Memory of a card that a method must fit, such as 11GB.", "any", "SIZE"),
    ] = None,
    gpu: Annotated[
        str | None,
        machine_option(
            "GPU preset with the memory that a method must fit.",
            "none",
            "NAME",
            autocompletion=completion("gpus"),
        ),
    ] = None,
    device: Device = None,
    out: Annotated[Path | None, option("New directory.", "under runs/", "DIR")] = None,
    resume: Annotated[
        bool, switch("--resume", "Continue in --out; finished runs are not repeated.")
    ] = False,
    json: Json = False,
    csv: Annotated[bool, switch("--csv", "Print the rows as CSV.")] = False,
    html: Annotated[
        Path | None, option("New file for a report with plots.", "none", "FILE")
    ] = None,
    **flags: Any,
) -> None:
    """Compare methods on MODEL and DATASET, or compare finished runs.

        razorctl compare vit-b16 ./photos --methods full,razor --html report.html

    Each DIR is the directory of a run or of a comparison. `finetune` runs every
    method and seed in its own process. If a run fails, its row shows the error. Of
    a recipe, only the ratio can be set; other settings are the method's defaults.

    Baselines are methods with other settings. full-stored and full-flash are full
    with stored or flash attention. accumulate is full with the fewest
    micro-batches whose peak is at most the peak of razor. gradcache does the same for
    embeddings: micro-batches share a loss and run forward twice. full-compiled is full
    with --compile. activation-memory-budget is full-compiled with a tenth of the
    activations stored. razor-compiled, razor-checkpoint
    (--activation-checkpointing), razor-lora (--lora), razor-branches (half of the
    residual branches in a step) and razor-int8-forward are razor with one more
    option.

    Any option that is a number may be a list, such as --lr 1e-5,3e-5,1e-4: each
    method is run with every value, and the last line has the command of the best.

    With --vram or --gpu, methods whose peak does not fit that memory are marked and
    not recommended; if none fits, the exit code is 3. The peak is measured on a
    GPU, and traced as by `plan` without one. Methods that do not fit are trained
    too, since others are compared with their score; --methods leaves them out.

    After the time of --budget the current run ends, and no new one starts; --resume
    runs the others. --html writes all figures, plots and commands to one file,
    which needs no network. With --resume it replaces an existing file.
    """
    from razorctl import api
    from razorctl.cli import calls
    from razorctl.cli.views import comparison as view

    if json and csv:
        raise UsageError("json and csv cannot both be printed; give one of them.")

    show = view.show_csv if csv else view.show
    # The environment sets options of any command, and does not apply to finished runs.
    sources = GIVEN[:1] if all(exist(what)) else GIVEN
    try:
        options = {"target": target, "html": html, "vram": vram, "gpu": gpu}
        result = calls.run(ctx, api.compare, *what, sources=sources, **options)
    except UsageError as error:
        if error.document is not None:
            print_result(ctx, error.document, show)
        raise
    print_result(ctx, result, show)
    raise typer.Exit(result.exit_code)
