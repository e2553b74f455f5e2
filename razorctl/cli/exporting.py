"""An export of a finished run, to a directory or to the hub."""

from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from razorctl.cli.views import common as views
from razorctl.errors import UsageError

# Functions below import what --help does not need.


def export(
    run: Path,
    to: str,
    out: Path | None,
    push_to_hub: str | None,
    private: bool,
    weights: str | None,
    dry_run: bool,
) -> dict[str, Any]:
    """The document of `export --json`; the arguments are as in `finished.export`."""
    from razorctl.system import hub
    from razorctl.training import run_files
    from razorctl.training.exporting import formats

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
    return document


def _folder(out: Path | None) -> AbstractContextManager[Path]:
    """A folder that is renamed to `out` when the block succeeds; None: a temporary folder."""
    from razorctl.system import atomic

    return atomic.scratch(Path(gettempdir())) if out is None else atomic.atomic_folder(out)
