"""A hub at 127.0.0.1 that speaks as much of its API as razorctl uses."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

from huggingface_hub import metadata_load

from tests import local_hub

LARGE = (".safetensors", ".onnx")  # files that are sent before a commit
# What the hub says of a data set beside its files.
CARD = """---
dataset_info:
  features:
  - name: {text}
    dtype: string
  - name: label
    dtype:
      class_label:
        names:
          '0': bad
          '1': good
  splits:
  - name: train
    num_bytes: 1
    num_examples: {rows}
  - name: test
    num_bytes: 1
    num_examples: {tested}
---
"""


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


class Handler(BaseHTTPRequestHandler):
    """there: the folder of the repositories, as a cache has them. faults: what is wrong.

    sent: the contents of large files by their digests.
    """

    there: Path
    faults: SimpleNamespace
    sent: dict[str, bytes]

    def do_GET(self):
        parts = self.path.split("?")[0].strip("/").split("/")
        if parts == ["api", "whoami-v2"]:
            return self.answer(self.faults.answers.get(self.path, 200), {"name": "me"})
        if parts[0] == "api":
            return self.ask(*parts[1:])
        kind = parts.pop(0) if parts[0] == "datasets" else "models"
        path = self.folder(kind, parts[:2]) / Path(*parts[4:])
        if not path.is_file():
            return self.answer(404, b"")
        if self.faults.gated:
            return self.answer(401, b"", {"X-Error-Code": "GatedRepo"})
        return self.send(path.read_bytes())

    do_HEAD = do_GET  # noqa: N815

    def do_POST(self):
        path = self.path.split("?")[0]
        if "/paths-info/" in path:
            return self.do_GET()
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if path == "/api/validate-yaml":
            return self.answer(200, {"errors": [], "warnings": []})
        if self.headers.get("Authorization") is None:
            return self.answer(401, b"")
        if path in self.faults.answers:
            return self.answer(self.faults.answers[path], b"")
        if path == "/api/repos/create":
            asked = json.loads(body)
            repo = asked["organization"], asked["name"]
            self.folder("models", repo).mkdir(parents=True, exist_ok=True)
            return self.answer(200, {"url": self.url("/".join(repo))})
        if path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            for each in objects:
                each["actions"] = {"upload": {"href": self.url(f"sent/{each['oid']}")}}
            return self.answer(200, {"transfer": "basic", "objects": objects})
        *_, org, name, verb, _ = path.split("/")
        return getattr(self, verb)(f"{org}/{name}", body)

    def do_PUT(self):
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.sent[hashlib.sha256(content).hexdigest()] = content
        self.answer(200, b"")

    def preupload(self, _, body):
        """The way that each file is to be sent: large ones by their digest, before the commit."""
        sent = [each["path"] for each in json.loads(body)["files"]]
        mode = {True: "lfs", False: "regular"}
        files = [
            {"path": path, "uploadMode": mode[path.endswith(LARGE)], "shouldIgnore": False}
            for path in sent
        ]
        self.answer(200, {"files": files})

    def commit(self, repo, body):
        """Puts the files of a commit into the folder of its repository."""
        folder = self.folder("models", repo.split("/"))
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                (folder / value["path"]).write_bytes(base64.b64decode(value["content"]))
            if line["key"] == "lfsFile":
                (folder / value["path"]).write_bytes(self.sent[value["oid"]])
        answer = {
            "commitUrl": self.url(f"{repo}/commit/{local_hub.COMMIT}"),
            "commitOid": local_hub.COMMIT,
        }
        self.answer(200, answer | {"success": True})

    def url(self, path):
        return f"http://{self.headers['Host']}/{path}"

    def folder(self, kind, repo):
        return self.there / f"{kind}--{'--'.join(repo)}" / "snapshots" / local_hub.COMMIT

    def ask(self, kind, *rest):
        """The API's answer about a repository, with all its files, or those that are asked for."""
        folder = self.folder(kind, rest[:2])
        if not folder.exists():
            return self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})
        if len(rest) == 2 or rest[2] == "revision":
            names = [file.relative_to(folder).as_posix() for file in files(folder)]
            answer = {"siblings": [{"rfilename": name} for name in names]}
            card = folder / "README.md"
            if kind == "models" and card.exists():
                answer["cardData"] = metadata_load(card)
            return self.answer(200, {"id": "/".join(rest[:2]), "sha": local_hub.COMMIT, **answer})
        entries = [self.entry(folder, file) for file in files(folder)]
        if rest[2] == "paths-info":
            paths = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["paths"]
            entries = [entry for entry in entries if entry["path"] in paths]
        return self.answer(200, entries)

    def entry(self, folder, file):
        oid = hashlib.sha256(file.read_bytes()).hexdigest()
        path = file.relative_to(folder).as_posix()
        return {"type": "file", "path": path, "size": file.stat().st_size, "oid": oid}

    def send(self, content):
        """A file, or the part of it that is asked for."""
        etag = hashlib.sha256(content).hexdigest()
        headers = {"X-Repo-Commit": local_hub.COMMIT, "ETag": etag, "Accept-Ranges": "bytes"}
        wanted = self.headers.get("Range")
        if wanted is None:
            return self.answer(200, content, headers)
        first, last = wanted.removeprefix("bytes=").split("-")
        end = min(int(last or len(content)) + 1, len(content))
        part = f"bytes {first}-{end - 1}/{len(content)}"
        return self.answer(206, content[int(first) : end], {**headers, "Content-Range": part})

    def answer(self, status, content, headers=()):
        if not isinstance(content, bytes):
            content = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": len(content), **dict(headers)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.faults.cuts and "ETag" in dict(headers):
            self.faults.cuts -= 1
            content, self.close_connection = content[: len(content) // 2], True
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@contextmanager
def serving(there: Path, faults: SimpleNamespace) -> Iterator[str]:
    """Yields the address of a hub that has the repositories in a folder."""
    handler = type("Hub", (Handler,), {"there": there, "faults": faults, "sent": {}})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        # A shutdown waits for the end of an interval.
        threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()
