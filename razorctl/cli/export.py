"""`razorctl export`."""

from pathlib import Path
from typing import Annotated

import typer

from razorctl.cli.options import Json, RunArgument, Weights, option, switch
from razorctl.cli.results import Result, print_result


def export(
    ctx: typer.Context,
    run: RunArgument,
    to: Annotated[
        str,
        option("Files of the model's own library, or ONNX.", metavar="[safetensors|onnx]"),
    ] = "safetensors",
    out: Annotated[
        Path | None, option("New directory to write.", "RUN-FORMAT beside RUN", "DIR")
    ] = None,
    push_to_hub: Annotated[
        str | None, option("Repository ORG/NAME of the hub to write.", "none", "NAME")
    ] = None,
    private: Annotated[bool, switch("--private", "Make a new repository a private one.")] = False,
    weights: Weights = None,
    dry_run: Annotated[
        bool, switch("--dry-run", "Export, but keep nothing; print the model card.")
    ] = False,
    json: Json = False,
) -> None:
    """Export the model of a finished RUN for other tools, or push it to the hub.

        razorctl export runs/photos --to onnx

    Either format comes with the model's configuration, such as the names of its
    classes, with its tokenizer, and with a model card, README.md, that has the
    method, the ratio, the data, the figures and the commands of the run. Other
    files of RUN are left out, and of paths all but their last part.

    onnx: model.onnx, or a file for each tower of images and texts, has an input for
    each tensor, and logits, which are compared with the logits of the model.

    safetensors: the files that timm.create_model or from_pretrained load. Those of
    a language model are what llama.cpp's convert_hf_to_gguf.py reads, which RUN
    itself has too.

    With --push-to-hub and --out, both are written.
    """
    from razorctl import finished
    from razorctl.cli import calls

    result = calls.run(ctx, finished.export)
    print_result(ctx, result, Result.show)
