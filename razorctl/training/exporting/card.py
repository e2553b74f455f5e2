"""The model card of a finished run: how it was trained, its figures, and how it is loaded."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from razorctl import models, units
from razorctl.data.own.read import hub as repositories
from razorctl.methods import METHODS
from razorctl.models import transformers
from razorctl.planning.plan import command_line
from razorctl.recipe import Recipe
from razorctl.training import rundir
from razorctl.training.predicting.inference import Trained
from razorctl.version import __version__

FILE = "README.md"
CLASSES = 20  # names of classes that are listed
# Modality and task -> the task as the hub calls it.
PIPELINES = {
    ("image", "classification"): "image-classification",
    ("image", "multi-label"): "image-classification",
    ("image", "segmentation"): "image-segmentation",
    ("text", "classification"): "text-classification",
    # As the hub has other models whose head is that of a classifier.
    ("text", "regression"): "text-classification",
    ("text", "multi-label"): "text-classification",
    ("text", "token-classification"): "token-classification",
    ("text", "causal-lm"): "text-generation",
    ("text", "masked-lm"): "fill-mask",
}
AUTO = {
    "image-classification": "ImageClassification",
    "image-segmentation": "SemanticSegmentation",
    "text-classification": "SequenceClassification",
    "token-classification": "TokenClassification",
    "text-generation": "CausalLM",
    "fill-mask": "MaskedLM",
}


def text(trained: Trained, name: str, to: str, export: str) -> str:
    """The card, in Markdown with a header in YAML. Of the user's paths it has the last part alone.

    Args:
        name: the repository, or the folder.
        to: the format.
        export: the command line that exported the run.
    """
    result, job = trained.result, trained.job
    trained_job = replace(
        type(job)(**result["job"]), model=shown(job.model), dataset=shown(job.dataset)
    )
    recipe = Recipe(**result["recipe"])
    pipeline = PIPELINES.get((trained.family.modality, trained.family.task))
    library = models.library_of(trained.weights.parent)
    commands = f"{command_line(trained_job, recipe)}\n{export}"
    rows = _rows(trained, trained_job.model, trained_job.dataset, recipe)
    return (
        f"{_header(trained, library, pipeline)}# {name.rpartition('/')[2]}\n\n"
        f"{trained_job.model}, fine-tuned on {trained_job.dataset} by razorctl {__version__} with "
        f"method {recipe.method}.\n\n{_table(rows)}\n"
        f"Figures of these weights on the {result['split']} split:\n\n{_table(_figures(trained))}\n"
        f"## Commands\n\n```sh\n{commands}\n```\n{_loading(library, pipeline, name, to)}"
    )


def shown(name: str) -> str:
    """The name of a model or of data, which for a path is its last part."""
    return (
        f"./{Path(name).name}" if Path(name).is_absolute() or name.startswith(os.curdir) else name
    )


def _header(trained: Trained, library: str, pipeline: str | None) -> str:
    from huggingface_hub import ModelCardData

    dataset = repositories.NAME.fullmatch(trained.job.dataset)
    data = ModelCardData(
        library_name=library,
        pipeline_tag=pipeline,
        base_model=transformers.repository(trained.job.model),
        datasets=[dataset[1]] if dataset else None,
        tags=["razorctl"],
    )
    return f"---\n{data.to_yaml()}\n---\n\n"


def _rows(trained: Trained, model: str, dataset: str, recipe: Recipe) -> Mapping[str, str]:
    result, job = trained.result, trained.job
    kept, full = result["saved_bytes"], result["full_saved_bytes"]
    rows = {
        "model": model,
        "data": dataset,
        "task": trained.family.task,
        "method": recipe.method,
        **({"ratio": f"{recipe.ratio:g}"} if METHODS[recipe.method].has_ratio else {}),
        "kept for backward": f"{units.size(kept)}, {units.percent(kept / full)} of full's",
        "length": f"{units.count(result['steps'], 'step')} of "
        f"{units.count(result['job']['batch_size'], 'example')}",
        "time of a step": f"{units.duration(result['step_seconds'])} on {result['device']}",
        "precision": str(result["job"]["precision"]),
    }
    if result["peak_bytes"] is not None:
        rows["peak memory"] = units.size(result["peak_bytes"])
    if trained.classes:
        more = ", ..." if len(trained.classes) > CLASSES else ""
        names = ", ".join(trained.classes[:CLASSES])
        rows["classes"] = f"{len(trained.classes):,}: {names}{more}"
    if job.input_size is not None:
        unit = "pixel" if trained.family.modality == "image" else "token"
        rows["input size"] = units.count(job.input_size, unit)
    return rows


def _figures(trained: Trained) -> Mapping[str, str]:
    """The figures of the weights, as the run has measured them."""
    result = trained.result
    best = result.get("best_metrics")
    last = trained.weights == trained.run / rundir.LAST
    figures = result["metrics"] if last or not best else best
    return {
        name.replace("_", " "): "-" if value is None else f"{value:.4f}"
        for name, value in figures.items()
    }


def _table(rows: Mapping[str, str]) -> str:
    cells = ({"name": name, "value": value.replace("|", "\\|")} for name, value in rows.items())
    lines = (f"| {row['name']} | {row['value']} |\n" for row in cells)
    return f"| | |\n|---|---|\n{''.join(lines)}"


def _loading(library: str, pipeline: str | None, name: str, to: str) -> str:
    """How the model is loaded; empty where its own library has no one call for that."""
    from razorctl.training.exporting import onnx_model

    if to == "onnx":
        code = f'session = onnxruntime.InferenceSession("{onnx_model.FILE}")'
        return f"\n## Use\n\n```python\nimport onnxruntime\n\n{code}\n```\n"
    if library == "timm":
        place = f"hf-hub:{name}" if "/" in name else f"local-dir:{name}"
        code = f'model = timm.create_model("{place}", pretrained=True)'
        return f"\n## Use\n\n```python\nimport timm\n\n{code}\n```\n"
    if library == "transformers" and pipeline in AUTO:
        auto = f"AutoModelFor{AUTO[pipeline]}"
        code = f'model = {auto}.from_pretrained("{name}")'
        return f"\n## Use\n\n```python\nfrom transformers import {auto}\n\n{code}\n```\n"
    return ""
