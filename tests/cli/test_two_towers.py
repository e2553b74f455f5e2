"""Embeddings of images and texts through the commands, of CLIP and of SigLIP."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModel, AutoProcessor

from razorctl import models
from razorctl.config.job import Job
from razorctl.config.recipe import Recipe
from razorctl.memory.job_forward import JobForward
from razorctl.planning.job_trace import trace
from razorctl.surgery.byte_budget import sparsify_within
from tests.cli import kinds as made
from tests.cli.commands import (
    assert_ends_with_an_error,
    assert_resumes_to_the_bit,
    done,
    razorctl,
)
from tests.kept import held_bytes
from tests.own import written

QUICK = ("--batch-size", "8", "--steps", "2", "--device", "cpu", "--lr", "0.01")
CPU = ("--device", "cpu")
FULL = ("--method", "full")  # fewer traces, where the method is no matter


@pytest.fixture(scope="module")
def towers(tmp_path_factory) -> Path:
    """A folder with models, and images with captions."""
    top = tmp_path_factory.mktemp("towers")
    made.towers(top)
    rows = made.captioned(top / "images")
    (top / "images/metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return top


@pytest.mark.parametrize("model", ["clip", "siglip"])
def test_a_run_its_evaluation_its_vectors_and_its_exports(model, towers):
    data = str(towers / "images")
    result = done("finetune", str(towers / model), data, *QUICK, "--out", "run")
    assert (result["metric"], result["classes"]) == ("mrr", ["image", "text"])
    assert result["saved_bytes"] <= 0.1 * result["full_saved_bytes"]
    begun, ended = (load_file(Path(f, "model.safetensors")) for f in (towers / model, "run"))
    learned = ["logit_scale", "logit_bias"][: 1 + (model == "siglip")]
    assert all(begun[name] != ended[name] for name in learned)
    found = done("evaluate", "run", *CPU, "--weights", "last")["metrics"]
    assert found == pytest.approx(result["metrics"], rel=1e-4, abs=1e-6)
    assert done("evaluate", "run", data, *CPU)["rows"] == made.COUNT
    Path("t.txt").write_text("w1 w2\n\nw3\n")
    image = str(towers / "images/1.png")
    assert razorctl("predict", "run", "t.txt", image, *CPU, "--out", "v.npy").exit_code == 0
    vectors = torch.from_numpy(np.load("v.npy"))
    assert vectors.norm(dim=1).tolist() == pytest.approx([1] * 3)
    assert razorctl("export", "run", "--out", "out").exit_code == 0
    stock, processor = AutoModel.from_pretrained("out"), AutoProcessor.from_pretrained("out")
    padding = "max_length" if model == "siglip" else True
    inputs = processor(
        images=Image.open(image), text=["w1 w2", "w3"], return_tensors="pt", padding=padding
    )
    with torch.no_grad():
        output = stock.eval()(**inputs)
    torch.testing.assert_close(output.text_embeds, vectors[:2], rtol=1e-3, atol=1e-5)
    # transformers resizes images by torchvision, not by PIL.
    torch.testing.assert_close(output.image_embeds, vectors[2:], rtol=0, atol=5e-3)
    words = (*QUICK, *FULL, "--out", "further", "--temperature", "0.1")
    further = done("finetune", "out", data, *words)
    scale = load_file("further/model.safetensors")["logit_scale"]
    torch.testing.assert_close(scale.exp(), torch.full_like(scale, 10.0))
    assert further["steps"] == 2


def test_onnx_has_a_file_for_each_tower(towers):
    import onnxruntime

    done("finetune", str(towers / "clip"), str(towers / "images"), *QUICK, *FULL, "--out", "run")
    graph = done("export", "run", "--to", "onnx", "--out", "out")["onnx"]
    assert graph["outputs"] == {"image_embeds": ["batch", 16], "text_embeds": ["batch", 16]}
    session = onnxruntime.InferenceSession("out/text_model.onnx")
    (vectors,) = session.run(None, {"input_ids": [[2, 6, 7, 3]], "attention_mask": [[1] * 4]})
    Path("t.txt").write_text("w0 w1\n")
    wanted = done("predict", "run", "t.txt", *CPU)["predictions"][0]["vector"]
    assert vectors.shape == (1, len(wanted))
    assert Path("out/vision_model.onnx").exists()
    assert "text_model.onnx" in Path("out/README.md").read_text()


@pytest.mark.parametrize(("accumulate", "method"), [(1, "full"), (2, "razor")])
def test_a_resumed_run_is_the_same_to_the_bit(accumulate, method, towers):
    settings = {"batch_size": 8, "accumulate": accumulate, "steps": 4, "save_every": 1}
    job = Job(str(towers / "clip"), str(towers / "images"), learning_rate=0.01, **settings)
    assert_resumes_to_the_bit(job, Recipe(method))


@pytest.mark.parametrize("model", ["clip", "siglip"])
@pytest.mark.parametrize("method", ["full", "razor"])
def test_a_plan_has_the_bytes_of_a_step(model, method, towers):
    name, recipe = str(towers / model), Recipe(method)
    family = models.find(name, "embedding")
    job = Job(name, "d", task="embedding", batch_size=8, steps=9, precision="fp32")
    job = job.resolved(family.defaults, 99)
    planned = trace(job, recipe, 2, device="cpu").saved
    net, whole = family.bare(2), JobForward(family, job, 2)
    inputs = whole.inputs(net, torch.device("cpu"))
    sparsify_within(net, recipe, inputs, **whole.options)
    assert held_bytes(net, family.logits, net.train(), inputs) == planned


def test_commands_of_comparison_and_of_data(towers, runs_here):
    data, model = str(towers / "images"), str(towers / "clip")
    words = (*QUICK, *FULL, "--task", "embedding", "--dry-run")
    shown = razorctl("finetune", model, data, *words)
    assert "image of 3 x 32 x 32 | w0 w0" in shown.stderr + shown.stdout, shown.stderr
    compared = done("compare", model, data, *QUICK, "--methods", "full,gradcache", "--seeds", "1")
    assert [row["method"] for row in compared["rows"]] == ["full", "gradcache"]
    full, cached = compared["rows"]
    assert cached["saved_bytes"] < full["saved_bytes"]
    assert cached["score"] == pytest.approx(full["score"], abs=1e-3)


def test_settings_that_are_refused(towers):
    data, model = str(towers / "images"), str(towers / "clip")
    for option, said in {
        ("--batch-size", "1"): "a batch of 1 has none",
        ("--symmetric",): "has images with texts; leave --symmetric out",
        ("--pooling", "first"): "has images with texts; leave --pooling out",
        ("--input-size", "64"): "takes images of 32 pixels",
    }.items():
        run = razorctl("finetune", model, data, *QUICK, *option, "--task", "embedding")
        assert (run.exit_code, said in run.stderr.splitlines()[-1]) == (2, True), run.stderr
    both = razorctl("finetune", model, data, "--image-column", "file_name", "--text-column", "a")
    assert_ends_with_an_error(both, "name one column, or --task embedding")
    texts = written({"anchor": made.WORDS, "positive": made.WORDS[::-1]})
    other = razorctl("finetune", model, texts, *QUICK)
    assert_ends_with_an_error(other, "choose a model of texts")
