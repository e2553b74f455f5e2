"""`razorctl export`."""

from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import gettempdir
from typing import Annotated

import typer

from razorctl.cli.options import Json, RunArgument, Weights, option, switch
from razorctl.cli.results import print_result
from razorctl.cli.views import common as views
from razorctl.cli.views import export as view
from razorctl.errors import UsageError


def export(
    ctx: typer.Context,
    run: RunArgument,
    to: Annotated[
        str | None,
        option("Files of the model's own library, or ONNX.", "safetensors", "[safetensors|onnx]"),
    ] = None,
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
    each tensor, and logits, which onnxruntime compares with those of the model.

    safetensors: the files that timm.create_model or from_pretrained load. Those of
    a language model are what llama.cpp's convert_hf_to_gguf.py reads, which RUN
    itself has too.

    With --push-to-hub and --out, both are written.
    """
    from razorctl.system import hub
    from razorctl.training import run_files
    from razorctl.training.exporting import formats

    to = to or "safetensors"
    _, job = run_files.finished_run(run)
    formats.check_format(to, run)
    if private and push_to_hub is None:
        raise UsageError("--private is for --push-to-hub; name a repository, or leave it out.")
    if push_to_hub is None and out is None:
        named = run if run.name not in ("", "..") else run.resolve()
        out = named.with_name(f"{named.name}-{to}")
    if push_to_hub is not None:
        hub.check_name(push_to_hub)
    with views.status(f"loading {run}") as at, _folder(None if dry_run else out) as folder:
        if push_to_hub is not None and not dry_run:
            hub.check_access(push_to_hub)
        from razorctl.training.exporting import folder as exporting
        from razorctl.training.predicting import inference

        trained = inference.load(run, weights=weights, device="cpu")
        at(f"exporting {run}")
        name = push_to_hub or ("" if out is None else out.name)
        writes = out is not None and not dry_run
        files, graph = exporting.write(trained, to, folder, name, copy=writes)
        document = {
            "run_dir": str(run),
            "model": job.model,
            "weights": str(trained.weights),
            "format": to,
            "out": str(out) if writes else None,
            "files": {each: file.stat().st_size for each, file in files.items()},
            "onnx": graph,
            "repository": push_to_hub,
            "url": None,
            "card": files["README.md"].read_text("utf-8") if dry_run else None,
        }
        if push_to_hub is not None and not dry_run:
            at(f"writing {push_to_hub}")
            document["url"] = hub.push(files, push_to_hub, private, exporting.title(trained))
    print_result(ctx, document, view.show)


def _folder(out: Path | None) -> AbstractContextManager[Path]:
    """A folder that is renamed to `out` when the block succeeds; None: a temporary folder."""
    from razorctl.system import atomic

    return atomic.scratch(Path(gettempdir())) if out is None else atomic.atomic_folder(out)
