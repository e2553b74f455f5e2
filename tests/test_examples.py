"""The scripts in scripts/examples, and razor on a model that has adapters of PEFT."""

import copy
import os
import re
import runpy
import shutil
import sys
import warnings
from pathlib import Path

import nbformat
import pytest
import timm
import torch
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from peft import LoraConfig, PeftModel, get_peft_model

import razorctl
from razorctl.layers.base import RazorLayer
from tests.models import SMALL
from tests.surgery.test_methods import cosine, step

EXAMPLES = Path(__file__).parents[1] / "scripts" / "examples"
TARGETS = {"vit": ["qkv", "fc1", "fc2"], "bert": ["query", "key", "value", "dense"]}


@pytest.fixture
def example(tmp_path, monkeypatch, capsys):
    def run(name):
        """The names that an example leaves, the share it says it saves, and its losses."""
        monkeypatch.chdir(tmp_path)
        torch.manual_seed(0)
        left = runpy.run_path(str(EXAMPLES / name))
        printed = capsys.readouterr().out
        (share,) = re.findall(r"stored for backward: (.*)% of", printed)
        assert not any(isinstance(module, RazorLayer) for module in left["model"].modules())
        return left, float(share), [float(loss) for loss in re.findall(r"loss (.*)", printed)]

    return run


def test_accelerate(example):
    _, share, losses = example("accelerate_loop.py")
    assert 0 < share <= 10
    assert losses[-1] < losses[0]


def test_trainer(example):
    _, share, _ = example("trainer.py")
    assert 0 < share <= 10


def test_lora(example):
    left, share, losses = example("lora.py")
    assert 0 < share <= 10
    assert losses[-1] < losses[0]
    torch.manual_seed(0)  # the weights that the example began with
    base = timm.create_model("vit_tiny_patch16_224", img_size=96, num_classes=10)
    loaded = PeftModel.from_pretrained(base, "adapter").eval()
    with torch.no_grad():
        assert torch.equal(loaded(left["images"]), left["model"].eval()(left["images"]))


# The model that the notebook plans for has two blocks, and its runs are tested on fewer digits.
SMALLER = """
from razorctl import data
from tests.models import few_tests, registered, few_blocks

smaller = registered(few_blocks("vit-b16"))
smaller.__enter__()
data.DATASETS["digits"] = few_tests(data.find("digits"))
"""


@pytest.fixture
def executed(tmp_path, monkeypatch, traces):
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parents[1]))
    monkeypatch.setenv("XDG_CACHE_HOME", str(traces))
    scripts = Path(sys.executable).parent
    monkeypatch.setenv("PATH", str(scripts), prepend=os.pathsep)  # of an active environment

    def execute(name, *changes):
        """The outputs of a notebook's cells, after changes of their sources.

        A command in a cell may be killed where memory is short, and stops no notebook. So a failure
        is first a warning with all outputs, and the notebook runs a second time in an empty folder.
        """
        try:
            return run(name, *changes)
        except CellExecutionError as error:
            warnings.warn(f"{error}\n{error.__notes__}", stacklevel=2)
            shutil.rmtree(tmp_path)
            tmp_path.mkdir()
            return run(name, *changes)

    def run(name, *changes):
        notebook = nbformat.read(EXAMPLES / name, nbformat.NO_CONVERT)
        nbformat.validate(notebook)
        cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
        assert not any(cell.outputs or cell.execution_count for cell in cells)  # stripped
        for cell in cells:
            for old, new in changes:
                cell.source = cell.source.replace(old, new)
        notebook.cells.insert(0, nbformat.v4.new_code_cell(SMALLER))
        resources = {"metadata": {"path": str(tmp_path)}}
        try:
            NotebookClient(notebook, timeout=500, resources=resources).execute()
        except CellExecutionError as error:
            error.add_note("".join(o.get("text", "") for cell in cells for o in cell.outputs))
            raise
        return [output for cell in cells for output in cell.outputs]

    return execute


def test_notebook(executed):
    # Which learn enough, and fewer ways.
    changes = ('"steps": 40', '"steps": 20'), ('"rtx-4090"', '"rtx-4090", max_ratio=0.5')
    outputs = executed("notebook.ipynb", *changes)
    results = [output.data for output in outputs if output.output_type == "execute_result"]
    assert [data["text/html"].count("<img") for data in results] == [0, 0, 1, 2, 0, 0]
    plan, profile, finetune, compare, evaluate, export = (data["text/html"] for data in results)
    assert "razor 0.5" in plan
    assert "LayerNorm" in profile
    assert "test accuracy" in finetune
    assert "razor 0.9" in compare
    assert "digits" in evaluate
    assert "model.safetensors" in export
    accuracies, weights = (o.text for o in outputs if o.get("name") == "stdout")
    scores = [float(score) for score in re.findall(r"(\S+)%", accuracies)]
    assert len(scores) == 2
    assert min(scores) > 60
    assert "weights in timm" in weights
    assert any("image/png" in output.get("data", {}) for output in outputs)
    lines = [
        output.data["text/plain"] for output in outputs if output.output_type == "display_data"
    ]
    assert any(re.search(r"step 20 of 20: loss", line) for line in lines)
    assert not any("IProgress" in output.get("text", "") for output in outputs)


def test_colab_notebook(executed, tmp_path):
    changes = ("--steps 40", "--steps 4"), ('"t4"', '"t4", max_ratio=0.5')
    # In the notebook's own process, which has imported what they need.
    outputs = executed("colab.ipynb", *changes, ("!razorctl", "%run -m razorctl"))
    displayed = (output.get("data", {}).get("text/plain", "") for output in outputs)
    printed = "".join((*(output.get("text", "") for output in outputs), *displayed))
    assert "error:" not in printed  # a command that fails stops no notebook
    assert "balanced accuracy" in printed
    assert "photos/test/7/48.png" in printed
    assert len((tmp_path / "runs/photos/metrics.jsonl").read_text().splitlines()) == 4
    assert (tmp_path / "exported/model.safetensors").exists()
    assert not (tmp_path / "razorctl-source").exists()
    results = [output.data for output in outputs if output.output_type == "execute_result"]
    assert results[0]["text/plain"] == "10"
    assert "razor 0.5" in results[1]["text/html"]


def adapted(kind, model):
    torch.manual_seed(2)
    net = get_peft_model(model, LoraConfig(r=4, target_modules=TARGETS[kind]))
    for name, parameter in net.named_parameters():
        if "lora_B" in name:  # zeros, so that no gradient would reach lora_A
            torch.nn.init.normal_(parameter, std=0.1)
    return net


@pytest.mark.parametrize("kind", SMALL)
def test_adapters_that_come_after_sparsify_have_the_gradient_of_stock_ones(kind):
    torch.manual_seed(0)
    build, batch = SMALL[kind]
    model, x = build().train(), batch()
    stock = adapted(kind, copy.deepcopy(model))
    razorctl.sparsify(model, razorctl.Recipe("razor", 0.7))
    net = adapted(kind, model)
    want, got = step(stock, x), step(net, x)
    assert torch.equal(got[0], want[0])
    assert [g is None for g in got] == [g is None for g in want]
    assert cosine(got[1:], want[1:]) > 0.99
    razorctl.restore(net)
    assert [type(m) for m in net.modules()] == [type(m) for m in stock.modules()]
    assert list(net.state_dict()) == list(stock.state_dict())


def test_empty_containers_of_adapters_are_not_named(caplog):
    caplog.set_level("INFO")
    razorctl.sparsify(adapted("vit", SMALL["vit"][0]()))
    assert "head" in caplog.text
    assert "lora_" not in caplog.text
