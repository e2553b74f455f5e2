"""`razorctl finetune`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from razorctl.cli.options import (
    JOB,
    PLANS,
    RECIPE,
    Device,
    Json,
    Preset,
    evaluation_option,
    option,
    plan_option,
    switch,
    with_options,
)
from razorctl.cli.results import Result, print_result
from razorctl.system import processes

FIRST = (
    *("out", "resume", "epochs", "steps", "batch_size", "learning_rate"),
    *("method", "ratio", "vram", "gpu", "json"),
)


@with_options(*PLANS, *RECIPE, *JOB, first=FIRST)
def finetune(
    ctx: typer.Context,
    plan: Annotated[
        Path | None,
        plan_option("Output file of `plan --json`; the run follows that plan.", "none", "FILE"),
    ] = None,
    recipe: Preset = None,
    device: Device = None,
    out: Annotated[Path | None, option("New run directory.", "under runs/", "DIR")] = None,
    resume: Annotated[
        bool, switch("--resume", "Continue the run in --out, or start there if it is new.")
    ] = False,
    dry_run: Annotated[
        bool,
        switch(
            "--dry-run",
            "Show the settings and a sample of the rows, and train nothing.",
            rich_help_panel="Machine",
        ),
    ] = False,
    tracker: Annotated[
        list[str] | None,
        evaluation_option(
            "Tracker of losses and metrics; may be repeated.", "none", "[tensorboard|trackio|wandb]"
        ),
    ] = None,
    json: Json = False,
    **flags: Any,
) -> None:
    """Fine-tune MODEL on DATASET and write the run to a directory.

        razorctl finetune vit-b16 ./photos --out runs/photos

    The run directory gets config.toml, metrics.jsonl and, at the end, result.json
    and the model in the format of timm or transformers. curves.png shows loss, score
    and learning rate; predictions.png, or predictions.html of texts, up to 256
    held-out rows with their predictions, the worst first. Other settings have
    measured defaults, which depend on the model and the method.

    With --vram or --gpu, the run is planned first, and on CUDA its memory is
    limited to the plan's. --plan runs the plan in a file. Without these options
    and without a recipe, a run on CUDA is planned for its GPU. The precision on
    CUDA is bf16, or fp16 on older GPUs.

    After Ctrl-C or a crash, --resume --out DIR continues a run from its newest
    checkpoint, to the same weights. MODEL, DATASET and settings may then be left
    out.

    Under torchrun, the processes share each batch; README.md shows the command.
    With several machines, each needs razorctl, the model and the data at the same
    path or name. The first machine writes --out; --resume needs a shared --out.

    Trackers get losses, learning rates and evaluations. TensorBoard and wandb
    write into the run directory; with WANDB_MODE=offline nothing leaves it.
    """
    from razorctl import api
    from razorctl.cli import calls

    result = calls.run(ctx, api.finetune)
    if processes.first():
        print_result(ctx, result, Result.show)
