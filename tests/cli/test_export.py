"""The command `export`: what it writes is what other tools read, here and on the hub."""

import json
import sys
from pathlib import Path
from shutil import copyfile, copytree

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard, constants
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from razorctl import models
from razorctl.models import timm
from razorctl.training.exporting import formats
from tests import local_hub
from tests.cli.commands import assert_ends_with_an_error, razorctl
from tests.training.runs import edit_result

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
OTHERS = ["README.md", "chat_template.jinja", "config.json", "generation_config.json"]
# Of httpx2, about a call of huggingface_hub.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.fixture(scope="module")
def trained(kinds, tmp_path_factory) -> Path:
    """A folder with the finished run of a decoder on conversations."""
    top = tmp_path_factory.mktemp("trained")
    settings = ["--batch-size", "4", "--steps", "2", "--input-size", "32", "--ratio", "0.5"]
    settings += ["--max-rows", "30"]
    done = razorctl(
        *("finetune", str(kinds / "llama"), str(kinds / "chats.jsonl"), *settings),
        *("--device", "cpu", "--lr", "0.01", "--out", str(top / "run")),
    )
    assert done.exit_code == 0, done.stderr
    return top


@pytest.fixture
def here(trained, tmp_path) -> Path:
    """A copy of the run in the current directory."""
    return copytree(trained, tmp_path, dirs_exist_ok=True)


def exported(*words: str) -> dict:
    result = razorctl("export", "run", *words, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_onnx_computes_the_logits_of_the_run(here):
    import onnxruntime

    document = exported("--to", "onnx", "--weights", "last")
    assert document["out"] == "run-onnx"
    names = sorted(file.name for file in Path("run-onnx").iterdir())
    assert names == [*document["files"]] == sorted([*OTHERS, "model.onnx", *TOKENIZER[:2]])
    axes = ["batch", "tokens"]
    assert document["onnx"]["inputs"] == {"input_ids": axes, "attention_mask": axes}
    assert document["onnx"]["outputs"] == {"logits": [*axes, 45]}
    assert document["onnx"]["difference"] < 1e-5
    ids = torch.randint(3, 45, (5, 21))
    mask = torch.ones_like(ids)
    mask[2, 9:] = 0
    stock = AutoModelForCausalLM.from_pretrained("run")
    with torch.no_grad():
        wanted = stock(input_ids=ids, attention_mask=mask).logits.numpy()
    session = onnxruntime.InferenceSession("run-onnx/model.onnx")
    (found,) = session.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})
    np.testing.assert_allclose(found[2, :9], wanted[2, :9], atol=1e-5)
    np.testing.assert_allclose(found[[0, 1, 3, 4]], wanted[[0, 1, 3, 4]], atol=1e-5)
    card = Path("run-onnx/README.md").read_text()
    assert "library_name: onnx\n" in card
    assert "2 steps of 4 examples, from at most 30 rows" in card
    exec(card.split("```python\n")[1].split("```")[0], values := {})
    assert values["logits"].shape[2] == 45


def test_a_decoder_is_written_as_transformers_writes_it(here, kinds):
    """And so as llama.cpp's converter reads it."""
    assert exported("--out", "out")["onnx"] is None
    AutoModelForCausalLM.from_pretrained("out").save_pretrained("stock")
    AutoTokenizer.from_pretrained("out").save_pretrained("stock")
    written = sorted(file.name for file in Path("stock").iterdir())
    assert sorted(file.name for file in Path("out").iterdir()) == ["README.md", *written]
    before, run, stock = (
        load_file(Path(folder, "model.safetensors")) for folder in (kinds / "llama", "run", "stock")
    )
    assert before.keys() == run.keys() == stock.keys()
    assert all(torch.equal(run[name], stock[name]) for name in run)
    for name in TOKENIZER:
        assert Path("out", name).read_bytes() == Path("run", name).read_bytes()
    assert Path("out/tokenizer.json").read_bytes() == Path("stock/tokenizer.json").read_bytes()
    assert Path("out/config.json").read_bytes() == (kinds / "llama/config.json").read_bytes()


@pytest.fixture
def account(monkeypatch, server):
    """A token for the local hub, which takes large files by HTTP."""
    monkeypatch.setenv("HF_TOKEN", "mine")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    return server


def test_a_run_on_the_hub_is_the_run(here, account, kinds):
    document = exported("--push-to-hub", "me/chats", "--private")
    assert document["url"].endswith(f"/me/chats/commit/{local_hub.COMMIT}")
    assert document["out"] is None
    assert not Path("run-safetensors").exists()
    built = models.find("hf:me/chats", "causal-lm").build(0, None)
    assert all(
        torch.equal(built.state_dict()[name], weight)
        for name, weight in load_file("run/model.safetensors").items()
    )
    (card,) = account.glob("models--me--chats/snapshots/*/README.md")
    text, result = card.read_text(), json.loads(Path("run/result.json").read_text())
    header = ModelCard(text).data
    assert (header.library_name, header.pipeline_tag) == ("transformers", "text-generation")
    assert header.metrics == ["perplexity", "accuracy"]
    assert {each.metric_type: each.metric_value for each in header.eval_results} == pytest.approx(
        result["best_metrics"], abs=1e-6
    )
    for row in (
        *("| method | razor |", "| ratio | 0.5 |", "| data | ./chats.jsonl |"),
        f"| perplexity | {result['best_metrics']['perplexity']:.4f} |",
        *("\nrazorctl finetune ./llama ./chats.jsonl ", " --ratio 0.5 --out run\n"),
        "\nrazorctl export run --to safetensors --push-to-hub me/chats\n",
        '= AutoModelForCausalLM.from_pretrained("me/chats")',
    ):
        assert row in text
    for file in card.parent.iterdir():
        assert str(kinds).encode() not in file.read_bytes()


def test_a_card_names_what_the_model_began_with(here, server):
    """The license of a model of the hub is the one that the hub tells."""
    began = server / f"models--some--base/snapshots/{local_hub.COMMIT}"
    began.mkdir(parents=True)
    copyfile("run/config.json", began / "config.json")
    (began / "README.md").write_text("---\nlicense: mit\n---\n")
    began_with = {"model": "hf:some/base", "dataset": "sst2"}
    edit_result(Path("run"), lambda result: result["job"].update(began_with))
    header = ModelCard(exported("--push-to-hub", "me/chats", "--dry-run")["card"]).data
    assert (header.base_model, header.license) == ("some/base", "mit")
    assert header.datasets == ["nyu-mll/glue"]
    for tags, repo in (({"tag": "a1_in1k"}, "timm/resnet50.a1_in1k"), ({}, None)):
        config = {"architecture": "resnet50", "pretrained_cfg": {**tags, "license": "apache-2.0"}}
        Path("config.json").write_text(json.dumps(config))
        assert timm.origin(Path()) == (repo, "apache-2.0")


def test_a_dry_run_keeps_nothing(here):
    before = sorted(here.rglob("*"))
    result = razorctl("export", "run", "--push-to-hub", "me/chats", "--dry-run")
    assert result.exit_code == 0, result.stderr
    assert "razorctl export run --to safetensors --push-to-hub me/chats" in result.stdout
    assert sorted(here.rglob("*")) == before


REFUSED = {
    "format": (["--to", "onx"], 2, "unknown format 'onx'; did you mean 'onnx'?"),
    "torchscript": (["--to", "torchscript"], 2, "torch has deprecated it; choose onnx."),
    "gguf": (["--to", "gguf"], 6, "convert_hf_to_gguf.py of llama.cpp is not on PATH; clone"),
    "gguf in a folder": (
        *(["--to", "gguf", "--llama-cpp", "run"], 6),
        "is not in run; clone https://github.com/ggml-org/llama.cpp and name its folder with "
        "--llama-cpp, or run `python convert_hf_to_gguf.py run --outfile model.gguf` there.",
    ),
    "no out": (["--out", ""], 2, ". exists already; name another directory with --out."),
    "private": (["--private"], 2, "name a repository, or leave it out."),
    "name": (["--push-to-hub", "me/a--b"], 2, "Cannot have -- or .. in repo_id: 'me/a--b')"),
    "address": (["--push-to-hub", "https://a.b/me/chats"], 2, "the hub allows no such name ("),
    "owner": (["--push-to-hub", "chats"], 2, "chats names no owner; write ORG/NAME"),
    "offline": (["--push-to-hub", "me/chats"], 6, "the hub cannot be reached; run again with a"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_exported_is_one_sentence(case, here, monkeypatch):
    words, code, sentence = REFUSED[case]
    monkeypatch.setenv("HF_TOKEN", "mine")
    result = razorctl("export", "run", *words)
    assert (result.exit_code, result.stdout) == (code, ""), result.stderr
    assert_ends_with_an_error(result, sentence)
    assert [path.name for path in here.iterdir()] == ["run"]


CONVERTER = """#!{python}
import json, sys
from pathlib import Path
folder, flag, out = sys.argv[1:]
assert flag == "--outfile" and Path(folder, "model.safetensors").exists()
print("INFO: writing", file=sys.stderr)
Path(out).write_text(json.loads(Path(folder, "config.json").read_text())["model_type"])
"""


@pytest.mark.parametrize("where", ["PATH", "folder"])
def test_llama_cpp_writes_gguf_where_its_script_is(where, here, monkeypatch):
    script = Path("llama.cpp/convert_hf_to_gguf.py")
    script.parent.mkdir()
    script.write_text(CONVERTER.format(python=sys.executable))
    words = ["--llama-cpp", "llama.cpp"]
    if where == "PATH":
        script.chmod(0o755)
        monkeypatch.setenv("PATH", str(script.parent.absolute()))
        words = []
    document = exported("--to", "gguf", *words)
    assert {*document["files"]} == {file.name for file in Path("run-gguf").iterdir()}
    assert Path("run-gguf/model.gguf").read_text() == "llama"
    card = Path("run-gguf/README.md").read_text()
    assert "library_name: gguf\n" in card
    assert card.endswith("```sh\nllama-cli -m run-gguf/model.gguf\n```\n")


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise ImportError('no gguf here')", "ImportError: no gguf here"),
        ("", "it says nothing"),
    ],
)
def test_a_script_of_llama_cpp_that_fails_is_quoted(code, reason, here):
    Path("convert_hf_to_gguf.py").write_text(code)
    result = razorctl("export", "run", "--to", "gguf", "--llama-cpp", ".")
    assert (result.exit_code, result.stdout) == (1, "")
    assert_ends_with_an_error(result, f"convert_hf_to_gguf.py cannot convert run ({reason}); ")
    assert not Path("run-gguf").exists()


def test_packages_that_are_not_installed_are_named(here, monkeypatch):
    monkeypatch.setattr(formats, "find_spec", lambda name: None)
    result = razorctl("export", "run", "--to", "onnx")
    assert result.exit_code == 2
    assert_ends_with_an_error(
        result, "which are not installed; run `pip install onnx onnxruntime onnxscript`, or"
    )


# The path that the hub refuses -> its status.
ANSWERS = {"/api/whoami-v2": 401, "/api/repos/create": 403, "/api/models/me/chats/commit/main": 500}


@pytest.mark.parametrize("path", ANSWERS)
def test_what_the_hub_refuses_is_told(path, here, account, faults):
    faults.answers[path] = ANSWERS[path]
    result = razorctl("export", "run", "--push-to-hub", "me/chats", "--out", "out")
    assert result.exit_code == 6
    assert_ends_with_an_error(result, f"the hub answers {ANSWERS[path]} for me/chats; try again")
    assert [path.name for path in here.iterdir() if path.name[0] != "t"] == ["run"]


def test_no_token_is_told_before_anything_is_written(here, server, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(here / "token"))
    result = razorctl("export", "run", "--push-to-hub", "me/chats")
    assert result.exit_code == 6
    assert_ends_with_an_error(result, "without a token of the hub; run `hf auth login`, or set")
    assert not list(server.glob("*"))
