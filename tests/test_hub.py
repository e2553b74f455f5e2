"""The hub and its cache: whole runs without network, through a local server, and refusals."""

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants
from typer.testing import CliRunner

from razorctl import data, models
from razorctl import hub as razor_hub
from razorctl.cli.app import app
from razorctl.errors import MissingError
from tests import local_hub

QUICK = ["--steps", "2", "--batch-size", "4", "--device", "cpu", "--ratio", "0.5", "--json"]
RUNS = {"vit-b16": ("cifar100", 32), "bert-base": ("rte", 24)}


@pytest.mark.parametrize("model", RUNS)
def test_a_whole_run_from_the_cache(model, hub, tmp_path, monkeypatch):
    dataset, size = RUNS[model]
    monkeypatch.setitem(models.models(), model, local_hub.ENTRIES[model])
    local_hub.cache_model(hub, model)
    local_hub.cache_data(hub, data.find(dataset))
    args = ["finetune", model, dataset, *QUICK, "--input-size", str(size)]
    result = CliRunner().invoke(app, [*args, "--out", str(tmp_path / "run")])
    assert result.exit_code == 0, result.stderr
    assert result.stderr.startswith(f"{model} on {dataset}: ")
    assert len(result.stderr.splitlines()) == 4  # what, where, what was settled, the last step
    document = json.loads(result.stdout)
    assert document["job"]["input_size"] == size
    assert document["saved_bytes"] < document["full_saved_bytes"]


def test_a_process_honors_hf_home_and_says_what_is_missing(hub, tmp_path):
    local_hub.cache_data(hub, data.find("cifar100"))
    environment = {**os.environ, "HF_HOME": str(hub.parent), "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = str(Path(razor_hub.__file__).parents[1])

    def razorctl(*args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "razorctl", "finetune", *args, *QUICK]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )

    cached = razorctl("vit-micro", "cifar100")
    assert (cached.returncode, "error" in cached.stderr) == (0, False)
    assert json.loads(cached.stdout)["dataset"] == "cifar100"
    missing = razorctl("vit-b16", "cifar100")
    assert (missing.returncode, missing.stdout) == (6, "")
    assert missing.stderr.splitlines()[-1] == (
        "error: vit-b16 is not in the local cache and the hub cannot be reached; run once with "
        "a network, or point HF_HOME at a cache that has it."
    )


@pytest.mark.parametrize("load", [data.find("rte").load, partial(models.find("vit-b16").build, 2)])
def test_a_refused_connection_is_told_at_once(load, hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    start = time.monotonic()
    with pytest.raises(MissingError, match="the hub cannot be reached; run once with a network"):
        load()
    assert time.monotonic() - start < 5


def test_an_unreachable_hub_leaves_what_is_cached(hub, monkeypatch):
    local_hub.cache_data(hub, data.find("rte"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert len(data.find("rte").load().train) == 8


@pytest.fixture
def server(hub, tmp_path, monkeypatch):
    """A hub at 127.0.0.1 that has what tests put into the folder returned, as a cache has it."""
    there = tmp_path / "there"

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self):
            parts = self.path.split("?")[0].strip("/").split("/")
            if parts[0] == "api":
                kind, *repo = parts[1], *parts[2:4]
                folder = there / f"{kind}--{'--'.join(repo)}" / "snapshots" / local_hub.COMMIT
                if not folder.exists():
                    return self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})
                if len(parts) == 4 or parts[4] == "revision":
                    return self.answer(200, {"id": "/".join(repo), "sha": local_hub.COMMIT})
                return self.answer(200, [self.entry(folder, f) for f in files(folder)])
            kind = parts.pop(0) if parts[0] == "datasets" else "models"
            repo, file = parts[:2], Path(*parts[4:])
            path = there / f"{kind}--{'--'.join(repo)}" / "snapshots" / local_hub.COMMIT / file
            if not path.is_file():
                return self.answer(404, b"")
            content = path.read_bytes()
            etag = hashlib.sha256(content).hexdigest()
            return self.answer(200, content, {"X-Repo-Commit": local_hub.COMMIT, "ETag": etag})

        do_HEAD = do_GET  # noqa: N815

        def entry(self, folder, file):
            oid = hashlib.sha256(file.read_bytes()).hexdigest()
            path = file.relative_to(folder).as_posix()
            return {"type": "file", "path": path, "size": file.stat().st_size, "oid": oid}

        def answer(self, status, content, headers=()):
            if not isinstance(content, bytes):
                content = json.dumps(content).encode()
            self.send_response(status)
            for name, value in {"Content-Length": len(content), **dict(headers)}.items():
                self.send_header(name, str(value))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def log_message(self, *_):
            pass

    def files(folder):
        return sorted(path for path in folder.rglob("*") if path.is_file())

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        url = f"http://127.0.0.1:{http.server_port}"
        monkeypatch.setattr(constants, "ENDPOINT", url)
        template = url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield there
        http.shutdown()


def test_what_is_downloaded_once_is_there_without_network(server, hub, monkeypatch):
    local_hub.cache_data(server, data.find("rte"))
    assert len(data.find("rte").load().train) == 8
    assert next(hub.glob("datasets--nyu-mll--glue/snapshots/*/rte/train-*")).exists()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert len(data.find("rte").load().train) == 8


def test_what_the_hub_does_not_have_is_missing(server, hub):
    with pytest.raises(MissingError, match="the hub answers 404 for nyu-mll/glue; try again later"):
        data.find("rte").load()
    folder = local_hub.cache_data(server, data.find("rte"))
    next(folder.glob("snapshots/*/rte/train-*")).unlink()
    with pytest.raises(MissingError, match=r"nyu-mll/glue on the hub lacks some of rte/train"):
        data.find("rte").load()


def test_whether_the_hub_answers(server, monkeypatch):
    assert razor_hub.unreachable() is None
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "cannot be reached (ConnectError)" in razor_hub.unreachable()
