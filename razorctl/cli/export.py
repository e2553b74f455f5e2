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
        option(
            "Format: safetensors for the model's own library, ONNX, or GGUF for llama.cpp.",
            metavar="[safetensors|onnx|gguf]",
        ),
    ] = "safetensors",
    out: Annotated[
        Path | None, option("New directory to write.", "RUN-FORMAT beside RUN", "DIR")
    ] = None,
    push_to_hub: Annotated[
        str | None, option("Repository ORG/NAME on the hub to write.", "none", "NAME")
    ] = None,
    private: Annotated[
        bool, switch("--private", "Make the repository private if it is new.")
    ] = False,
    weights: Weights = None,
    llama_cpp: Annotated[
        Path | None,
        option("Folder of llama.cpp, which writes GGUF.", "where the shell finds it", "DIR"),
    ] = None,
    dry_run: Annotated[
        bool, switch("--dry-run", "Print the model card and the files, and write nothing.")
    ] = False,
    json: Json = False,
) -> None:
    """Export the model of a finished RUN for other tools, or push it to the hub.

        razorctl export runs/photos --to onnx

    Every format includes a model card. The card, README.md, has the method, the ratio,
    the data, the metrics and the commands of the run. All but gguf include the
    configuration of the model with its class names, and the tokenizer. Other files of
    RUN are left out. Paths are shortened to their last part.

    onnx: model.onnx, or one file for the image tower and one for the text tower.
    Its logits are compared with the logits of the model.

    safetensors: the files that timm.create_model or from_pretrained load.

    gguf: model.gguf of a causal-lm, which llama.cpp's convert_hf_to_gguf.py writes.
    The script is part of llama.cpp; name its folder with --llama-cpp.

    With --push-to-hub and --out, both are written.
    """
    from razorctl import finished
    from razorctl.cli import calls

    result = calls.run(ctx, finished.export)
    print_result(ctx, result, Result.show)
