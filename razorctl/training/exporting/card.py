"""The model card of a finished run: how it was trained, its figures, and how it is loaded."""

import os
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from razorctl import models, units
from razorctl.config.recipe import Recipe
from razorctl.config.tasks import FIGURES
from razorctl.data.own.read import hub as repositories
from razorctl.methods import METHODS
from razorctl.models import timm, transformers
from razorctl.planning.plan import command_line
from razorctl.system import hub
from razorctl.training import rundir
from razorctl.training.predicting.inference import Trained
from razorctl.version import __version__

FILE = "README.md"
TIMM = ("timm", "razorctl")  # the second one puts heads on timm's backbones
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
# Figures whose names on the hub are others.
METRICS = {
    "matthews": "matthews_correlation",
    "pearson": "pearsonr",
    "spearman": "spearmanr",
}
# What the names of a run are called, if not classes.
NAMES = {"regression": "value", "multi-label": "labels", "token-classification": "tags"}


def text(trained: Trained, name: str, to: str, graph: Mapping[str, Any] | None) -> str:
    """The card, in Markdown with a header in YAML. Of the user's paths it has the last part alone.

    Args:
        name: the repository, or the folder.
        to: the format.
        graph: what `onnx_model.write` returned; None for another format.
    """
    result, job = trained.result, trained.job
    trained_job = replace(
        type(job)(**result["job"]), model=shown(job.model), dataset=shown(job.dataset)
    )
    recipe = Recipe(**result["recipe"])
    pipeline = PIPELINES.get((trained.family.modality, trained.family.task))
    library = models.library_of(trained.weights.parent)
    run = trained.run.resolve().name
    export = ["razorctl", "export", run, "--to", to]
    export += ["--push-to-hub", name] if "/" in name else []
    export += ["--weights", "last"] if trained.weights == trained.run / rundir.LAST else []
    commands = f"{command_line(trained_job, recipe)} --out {shlex.quote(run)}\n{shlex.join(export)}"
    rows = _rows(trained, trained_job.model, trained_job.dataset, recipe)
    figures = {
        figure.replace("_", " "): "-" if value is None else f"{value:.4f}"
        for figure, value in _figures(trained).items()
    }
    shown_library = "onnx" if to == "onnx" else library
    header = _header(trained, shown_library, library, pipeline, name, trained_job.dataset)
    return (
        f"{header}# {name.rpartition('/')[2]}\n\n"
        f"{trained_job.model}, fine-tuned on {trained_job.dataset} by razorctl {__version__} with "
        f"method {recipe.method}.\n\n{_table(rows)}\n"
        f"Figures of these weights on the {result['split']} split:\n\n{_table(figures)}\n"
        f"## Commands\n\n```sh\n{commands}\n```\n"
        f"{_of_onnx(graph, library, name) if graph else _loading(library, pipeline, name)}"
    )


def shown(name: str) -> str:
    """The name of a model or of data, which for a path is its last part."""
    return (
        f"./{Path(name).name}" if Path(name).is_absolute() or name.startswith(os.curdir) else name
    )


def _header(
    trained: Trained, shown_library: str, library: str, pipeline: str | None, name: str, data: str
) -> str:
    """The header that the hub reads; data: the name of the data set."""
    from huggingface_hub import EvalResult, ModelCardData

    repository = _data_repository(trained.job.dataset)
    base, license_ = _origin(trained, library, ask="/" in name)
    figures = {METRICS.get(n, n): value for n, value in _figures(trained).items()}
    results = [
        EvalResult(
            task_type=pipeline,
            dataset_type=repository or data,
            dataset_name=data,
            dataset_split=trained.result["split"],
            metric_type=metric,
            metric_value=round(value, 6),
        )
        for metric, value in figures.items()
        if pipeline is not None and value is not None
    ]
    header = ModelCardData(
        library_name=shown_library,
        pipeline_tag=pipeline,
        license=license_,
        base_model=base,
        datasets=[repository] if repository else None,
        metrics=[metric for metric in figures if metric != "loss"],
        model_name=name.rpartition("/")[2] if results else None,
        eval_results=results or None,
        tags=["razorctl"],
    )
    return f"---\n{header.to_yaml()}\n---\n\n"


def _data_repository(dataset: str) -> str | None:
    """The repository of a data set on the hub; None for one's own and for others."""
    from razorctl.data import DATASETS

    if dataset in DATASETS:
        return DATASETS[dataset].repository
    found = repositories.NAME.fullmatch(dataset)
    return found[1] if found else None


def _origin(trained: Trained, library: str, ask: bool) -> tuple[str | None, str | None]:
    """The repository of the pretrained weights, and their license; None for what is unknown.

    ask: whether the hub is asked for the license.
    """
    if trained.job.from_scratch:
        return None, None
    if library in TIMM:
        named = not Path(trained.job.model).is_absolute()
        base, license_ = timm.origin(trained.weights.parent)
        return (base if named else None), license_
    base = transformers.repository(trained.job.model)
    return base, hub.license_of(base) if base and ask else None


def _rows(trained: Trained, model: str, dataset: str, recipe: Recipe) -> Mapping[str, str]:
    result, job = trained.result, trained.job
    stored, full = result["saved_bytes"], result["full_saved_bytes"]
    rows = {
        "model": model,
        "data": dataset,
        "task": trained.family.task,
        "method": recipe.method,
        **({"ratio": f"{recipe.ratio:g}"} if METHODS[recipe.method].has_ratio else {}),
        **({"trained weights": "LoRA adapters, merged"} if recipe.lora else {}),
        **({} if job.ema is None else {"averaged weights": f"decay {job.ema:g}"}),
        "stored for backward": f"{units.size(stored)}, {units.percent(stored / full)} of full's",
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
        count = f"{len(trained.classes):,}: " if len(trained.classes) > 1 else ""
        rows[NAMES.get(trained.family.task, "classes")] = f"{count}{names}{more}"
    if job.input_size is not None:
        unit = "pixel" if trained.family.modality == "image" else "token"
        rows["input size"] = units.count(job.input_size, unit)
    return rows


def _figures(trained: Trained) -> dict[str, float | None]:
    """The figures of the weights, as the run has measured them, in the order of the task's."""
    result = trained.result
    best = result.get("best_metrics")
    last = trained.weights == trained.run / rundir.LAST
    figures = result["metrics"] if last or not best else best
    order = [name for name in FIGURES[trained.family.task] if name in figures]
    return {name: figures[name] for name in (*order, *(n for n in figures if n not in order))}


def _table(rows: Mapping[str, str]) -> str:
    lines = (
        "| {} | {} |\n".format(name, value.replace("|", r"\|")) for name, value in rows.items()
    )
    return f"| | |\n|---|---|\n{''.join(lines)}"


def _use(*code: str) -> str:
    return "\n".join(("\n## Use\n\n```python", *code, "```\n"))


def _loading(library: str, pipeline: str | None, name: str) -> str:
    """How the model is loaded; empty where its own library has no one call for that."""
    if library == "timm":
        place = f"hf-hub:{name}" if "/" in name else f"local-dir:{name}"
        code = f'model = timm.create_model("{place}", pretrained=True)'
        return _use("import timm", "", code)
    if library == "transformers" and pipeline in AUTO:
        auto = f"AutoModelFor{AUTO[pipeline]}"
        code = f'model = {auto}.from_pretrained("{name}")'
        if pipeline.startswith("image"):
            return _use(f"from transformers import {auto}", "", code)
        tokenizer = f'tokenizer = AutoTokenizer.from_pretrained("{name}")'
        return _use(f"from transformers import {auto}, AutoTokenizer", "", tokenizer, code)
    return ""


def _of_onnx(graph: Mapping[str, Any], library: str, name: str) -> str:
    """How onnxruntime computes logits; graph: what `onnx_model.write` returned."""
    from razorctl.training.exporting import onnx_model

    hub_name = "/" in name
    imports = ["import onnxruntime"]
    imports += ["from huggingface_hub import snapshot_download"] if hub_name else []
    place = f'snapshot_download("{name}")' if hub_name else f'"{name}"'
    code = [f"folder = {place}"]
    code += [f'session = onnxruntime.InferenceSession(f"{{folder}}/{onnx_model.FILE}")']
    inputs = graph["inputs"]
    if "input_ids" in inputs:
        imports.append("from transformers import AutoTokenizer")
        of_pairs = ", return_token_type_ids=True" if "token_type_ids" in inputs else ""
        code += [
            "tokenizer = AutoTokenizer.from_pretrained(folder)",
            f'texts = tokenizer(["a text"], return_tensors="np"{of_pairs})',
            "feed = {each.name: texts[each.name] for each in session.get_inputs()}",
        ]
    else:
        imports.append("import numpy")
        ((pixels, axes),) = inputs.items()
        file = "config.json" if library in TIMM else "preprocessor_config.json"
        size = ", ".join(map(str, axes[1:]))
        code += [
            f"images = numpy.zeros((1, {size}), numpy.float32)  # scaled as {file} says",
            f'feed = {{"{pixels}": images}}',
        ]
    return _use(*sorted(imports), "", *code, '(logits,) = session.run(["logits"], feed)')
