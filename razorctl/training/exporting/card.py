"""The model card of a finished run: how it was trained, its figures, and how it is loaded."""

import os
import shlex
from collections.abc import Mapping, Sequence
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
TIMM = ("timm", "razorctl")  # libraries of timm's models, and of razorctl's heads on them
CLASSES = 20  # most names of classes
TOWERS = "zero-shot-image-classification"  # the hub's name for embeddings of images and texts
# Modality and task -> the name of the task on the hub.
PIPELINES = {
    ("image", "classification"): "image-classification",
    ("image", "multi-label"): "image-classification",
    ("image", "segmentation"): "image-segmentation",
    ("image", "detection"): "object-detection",
    ("text", "classification"): "text-classification",
    # The name for all models with the head of a classifier.
    ("text", "regression"): "text-classification",
    ("text", "multi-label"): "text-classification",
    ("text", "token-classification"): "token-classification",
    ("text", "causal-lm"): "text-generation",
    ("text", "masked-lm"): "fill-mask",
    ("text", "embedding"): "sentence-similarity",
    ("image", "embedding"): TOWERS,
}
AUTO = {
    "image-classification": "ImageClassification",
    "image-segmentation": "SemanticSegmentation",
    "object-detection": "ObjectDetection",
    "text-classification": "SequenceClassification",
    "token-classification": "TokenClassification",
    "text-generation": "CausalLM",
    "fill-mask": "MaskedLM",
}
IMAGE = 'image = Image.new("RGB", (64, 64))  # yours'
# Figure -> its name on the hub, if it has another one there.
METRICS = {"matthews": "matthews_correlation", "pearson": "pearsonr", "spearman": "spearmanr"}
# Task -> the word for its classes, if it has another one.
NAMES = {
    "embedding": "texts",
    "regression": "value",
    "multi-label": "labels",
    "token-classification": "tags",
}


def text(trained: Trained, name: str, to: str, graph: Mapping[str, Any] | None) -> str:
    """The card, in Markdown with a header in YAML. A path of the user is shown by its last part.

    Args:
        name: the repository, or the folder.
        to: the format.
        graph: the result of `onnx_model.write`; None for another format.
    """
    result, job = trained.result, trained.job
    job = replace(type(job)(**result["job"]), model=shown(job.model), dataset=shown(job.dataset))
    recipe = Recipe(**result["recipe"])
    pipeline = PIPELINES.get((trained.family.modality, trained.family.task))
    library = models.library_of(trained.weights.parent)
    run = trained.run.resolve().name
    export = ["razorctl", "export", run, "--to", to]
    export += ["--push-to-hub", name] if "/" in name else []
    export += ["--weights", "last"] if trained.weights == trained.run / rundir.LAST else []
    commands = f"{command_line(job, recipe)} --out {shlex.quote(run)}\n{shlex.join(export)}"
    figures = {
        figure.replace("_", " "): "-" if value is None else f"{value:.4f}"
        for figure, value in _figures(trained).items()
    }
    use = _loading(library, pipeline, name)
    if pipeline == "object-detection":
        use = _finding(trained, name)
    if to == "gguf":
        place = f"-hf {name}" if "/" in name else f"-m {name}/model.gguf"
        use = f"\n## Use\n\n```sh\nllama-cli {place}\n```\n"
    return (
        f"{_header(trained, to, library, pipeline, name, job.dataset)}"
        f"# {name.rpartition('/')[2]}\n\n"
        f"{job.model}, fine-tuned on {job.dataset} by razorctl {__version__} with method "
        f"{recipe.method}.\n\n{_table(_rows(trained, job.model, job.dataset, recipe))}\n"
        f"Figures of these weights on the {result['split']} split:\n\n{_table(figures)}\n"
        f"## Commands\n\n```sh\n{commands}\n```\n"
        f"{_of_onnx(trained, graph, library, name) if graph else use}"
    )


def shown(name: str) -> str:
    """The name of a model or a data set; a path as ./ and its last part."""
    is_path = Path(name).is_absolute() or name.startswith(os.curdir)
    return f"./{Path(name).name}" if is_path else name


def _header(
    trained: Trained, to: str, library: str, pipeline: str | None, name: str, data: str
) -> str:
    """The header, which the hub reads; data: the name of the data set."""
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
        library_name=library if to == "safetensors" else to,
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
    """The repository of a data set on the hub; None without one."""
    from razorctl.data import DATASETS

    if dataset in DATASETS:
        return DATASETS[dataset].repository
    match = repositories.NAME.fullmatch(dataset)
    return match[1] if match else None


def _origin(trained: Trained, library: str, ask: bool) -> tuple[str | None, str | None]:
    """The repository of the pretrained weights, and their license; None if unknown.

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
    rows = {"model": model, "data": dataset, "task": trained.family.task, "method": recipe.method}
    if METHODS[recipe.method].has_ratio:
        rows["ratio"] = f"{recipe.ratio:g}"
    if recipe.lora:
        rows["trained weights"] = "LoRA adapters, merged"
    if job.ema is not None:
        rows["averaged weights"] = f"decay {job.ema:g}"
    steps, batch = result["steps"], result["job"]["batch_size"]
    few = "" if job.max_rows is None else f", from at most {units.count(job.max_rows, 'row')}"
    rows |= {
        "stored for backward": f"{units.size(stored)}, {units.percent(stored / full)} of full "
        "fine-tuning",
        "training": f"{units.count(steps, 'step')} of {units.count(batch, 'example')}{few}",
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
    """The figures of the weights in the run, in the order of the task's figures."""
    last = trained.weights == trained.run / rundir.LAST
    figures = trained.result["metrics" if last else "best_metrics"]
    names = dict.fromkeys((*FIGURES[trained.family.task], *figures))
    return {name: figures[name] for name in names if name in figures}


def _table(rows: Mapping[str, str]) -> str:
    lines = (
        "| {} | {} |\n".format(name, value.replace("|", r"\|")) for name, value in rows.items()
    )
    return f"| | |\n|---|---|\n{''.join(lines)}"


def _use(*code: str) -> str:
    return "\n".join(("\n## Use\n\n```python", *code, "```\n"))


def _loading(library: str, pipeline: str | None, name: str) -> str:
    """Code that loads the model; empty if its library has no single call for that."""
    if pipeline == "sentence-similarity":
        code = f'model = SentenceTransformer("{name}")'
        return _use("from sentence_transformers import SentenceTransformer", "", code)
    if pipeline == TOWERS:
        code = f'model = AutoModel.from_pretrained("{name}")'
        processor = f'processor = AutoProcessor.from_pretrained("{name}")'
        return _use("from transformers import AutoModel, AutoProcessor", "", processor, code)
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


def _sides(trained: Trained) -> str:
    """Code for the width and the height in pixels that shares of boxes refer to."""
    from razorctl.training.exporting import onnx_model

    config = onnx_model.data_config(trained)
    if config["letterbox"] and not config["mask"]:
        return "width = height = max(image.size)  # shares are of the image padded to a square"
    return "width, height = image.size"


def _finding(trained: Trained, name: str) -> str:
    """Code that finds objects with transformers."""
    return _use(
        "from PIL import Image",
        "from transformers import AutoImageProcessor, AutoModelForObjectDetection",
        "",
        f'processor = AutoImageProcessor.from_pretrained("{name}")',
        f'model = AutoModelForObjectDetection.from_pretrained("{name}")',
        IMAGE,
        _sides(trained),
        'output = model(**processor(image, return_tensors="pt"))',
        "(found,) = processor.post_process_object_detection(",
        "    output, threshold=0.5, target_sizes=[(height, width)]",
        ")  # scores, labels, and boxes as left, top, right and bottom in pixels",
    )


def _of_objects(trained: Trained) -> Sequence[str]:
    """Code that turns the outputs of `onnx_model.OBJECTS` into objects in pixels."""
    return (
        "image_scores, image_boxes = scores[0], boxes[0]  # a score for each class, and shares",
        "best = numpy.argsort(-image_scores, axis=None)[:100]",
        "queries, labels = numpy.unravel_index(best, image_scores.shape)",
        "kept = image_scores[queries, labels] >= 0.5",
        "queries, labels = queries[kept], labels[kept]  # labels are numbers of classes",
        IMAGE,
        _sides(trained),
        "x, y, wide, high = image_boxes[queries].T",
        "corners = [x - wide / 2, y - high / 2, x + wide / 2, y + high / 2]",
        "found = numpy.stack(corners, 1) * [width, height, width, height]  # in pixels",
    )


def _of_onnx(trained: Trained, graph: Mapping[str, Any], library: str, name: str) -> str:
    """Code that runs a model by onnxruntime; graph: the result of `onnx_model.write`."""
    from razorctl.training.exporting import onnx_model

    imports, folder, inputs = ["import onnxruntime"], f'"{name}"', graph["inputs"]
    if "/" in name:
        imports.append("from huggingface_hub import snapshot_download")
        folder = f"snapshot_download({folder})"
    *_, output = outputs = tuple(graph["outputs"])
    towers = outputs not in ((output,), onnx_model.OBJECTS)
    file = onnx_model.TOWERS[1] if towers else onnx_model.FILE
    code = [f"folder = {folder}"]
    code += [f'session = onnxruntime.InferenceSession(f"{{folder}}/{file}")']
    if "input_ids" in inputs:
        imports.append("from transformers import AutoTokenizer")
        types = ", return_token_type_ids=True" if "token_type_ids" in inputs else ""
        types += "" if "attention_mask" in inputs else ', padding="max_length"'
        code += [
            "tokenizer = AutoTokenizer.from_pretrained(folder)",
            f'texts = tokenizer(["a text"], return_tensors="np"{types})',
            "feed = {each.name: texts[each.name] for each in session.get_inputs()}",
        ]
    else:
        imports.append("import numpy")
        (pixels, axes), *masks = inputs.items()
        file = "config.json" if library in TIMM else "preprocessor_config.json"
        size = ", ".join(map(str, axes[1:]))
        code += [
            f"images = numpy.zeros((1, {size}), numpy.float32)  # scaled as {file} says",
            f'feed = {{"{pixels}": images}}',
        ]
        for mask, (_, *sides) in masks:
            size = ", ".join(map(str, sides))
            ones = f'feed["{mask}"] = numpy.ones((1, {size}), numpy.int64)'
            code += [f"{ones}  # 0 where the image is padded"]
    if outputs == onnx_model.OBJECTS:
        imports.append("from PIL import Image")
        code += ["scores, boxes = session.run(None, feed)", *_of_objects(trained)]
    else:
        code += [f'({output},) = session.run(["{output}"], feed)']
    return _use(*sorted(imports), "", *code)
