"""Fails each system call of a command on a file, in turn, and looks at what is left.

    .venv/bin/python scripts/bench/faults.py

A command runs in a process that is forked from this one, so that libraries are imported once, and
strace makes its N-th call of a kind fail, or kills it there: for every kind, every N on a file
below its folder, and every error that such a call may have. Afterwards the exit code must be one of
README.md's, with one sentence; what was there before must be there unchanged; the output must be as
that of a command that nothing has disturbed if the code is 0, and else not there; and a run must
end, resumed, with the weights of one that nothing has disturbed. The script writes
results/faults.json, and exits with 1 if any of this does not hold. It needs Linux and strace.
"""

import gc
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from record import device_name, head, options, write
from timm import create_model
from timm.models import save_for_hf
from torch import Tensor

from razorctl.cli.app import app
from razorctl.training.checkpoints import Checkpoints

KILL = "KILL"
CODES = {0, 1, 2, 3, 4, 5, 6}  # that a command may end with which nobody stops
QUICK = ["--batch-size", "4", "--device", "cpu", "--method", "full", "--workers", "0"]
STEPS = ["--steps", "4", "--save-every", "1", "--evaluate-every", "2"]
ON_CPU = ["--device", "cpu", "--out", "out"]
COMMANDS = {
    "predict": ["predict", "run", "data", *ON_CPU],
    "predict masks": ["predict", "seg", "shapes/validation/images", *ON_CPU],
    "export": ["export", "run", "--out", "out"],
    "export onnx": ["export", "run", "--to", "onnx", "--out", "out"],
    "compare": ["compare", "run", "--html", "out"],
    "resume": ["finetune", "--resume", "--out", "begun"],
}
OPENS = ("EACCES", "EIO", "EMFILE", "ENOMEM", "ENOSPC")
READS = ("EIO", "ENOMEM")
WRITES = ("ENOSPC", "EIO", KILL)
NAMES = ("EACCES", "EIO", "ENOSPC", KILL)
ERRORS = {
    "openat": (*OPENS, KILL),
    **dict.fromkeys(("read", "pread64", "getdents64", "lseek", "fcntl"), READS),
    **dict.fromkeys(("newfstatat", "fstat", "statx", "access", "faccessat2", "readlink"), READS),
    **dict.fromkeys(("write", "pwrite64", "writev", "fsync", "fdatasync", "ftruncate"), WRITES),
    **dict.fromkeys(("sendfile", "copy_file_range", "fallocate", "flock"), WRITES),
    **dict.fromkeys(("rename", "renameat", "renameat2", "link", "linkat", "unlink"), NAMES),
    **dict.fromkeys(("unlinkat", "rmdir", "mkdir", "mkdirat", "chmod", "fchmod", "symlink"), NAMES),
    **dict.fromkeys(("fchmodat", "fchmodat2", "utimensat", "statfs"), NAMES),
}
CONTENTS = ("read", "pread64", "write", "pwrite64")  # strace shows bytes of files in quotes
LEFT = re.compile(r"(^|/)\.razorctl-[0-9a-f]{32}")
LONGEST = 60.0  # seconds of a command
DRAW = np.random.default_rng(0)


def images(folder: Path, most: int = 255, size: tuple[int, ...] = (8, 8, 3)) -> None:
    """Four random images in a folder."""
    folder.mkdir(parents=True)
    for number in range(4):
        Image.fromarray(DRAW.integers(0, most, size, np.uint8)).save(folder / f"{number}.png")


def called(words: Sequence[str]) -> int:
    """The exit code of a command in this process."""
    try:
        app(words)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def forked(place: Path, words: Sequence[str]) -> int:
    """The id of a new process, stopped before a command; the output is in stdout and stderr."""
    process = os.fork()
    if process:
        os.waitpid(process, os.WUNTRACED)
        return process
    try:
        os.chdir(place / "here")
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(place / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.kill(os.getpid(), signal.SIGSTOP)
        code = called(words)
        sys.stderr.flush()
        os._exit(code)
    finally:
        import traceback

        traceback.print_exc()
        os._exit(99)


def traced(place: Path, words: Sequence[str], *inject: str) -> int:
    """The exit code of a command below strace, whose lines are in `trace`; negative: a signal."""
    process = forked(place, words)
    calls = ",".join(f"?{call}" for call in ERRORS)
    watch = ["strace", "-f", "-y", "-p", str(process), "-o", str(place / "trace")]
    strace = subprocess.Popen(
        [*watch, "-e", f"trace={calls}", *inject], stderr=subprocess.PIPE, text=True
    )
    assert strace.stderr is not None
    while "attached" not in (line := strace.stderr.readline()):
        if not line:
            raise RuntimeError("strace cannot attach")
    signal.signal(signal.SIGALRM, lambda *_: os.kill(process, signal.SIGKILL))
    signal.setitimer(signal.ITIMER_REAL, LONGEST)
    os.kill(process, signal.SIGCONT)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    signal.setitimer(signal.ITIMER_REAL, 0)
    strace.stderr.close()
    strace.wait()
    return code


def files(folder: Path) -> dict[str, str]:
    """The digest of each file below a folder by its path, and "" for each folder."""
    return {
        path.relative_to(folder).as_posix(): sha256(path.read_bytes()).hexdigest()
        if path.is_file()
        else ""
        for path in sorted(folder.rglob("*"))
    }


class Case:
    """A command in a folder of its own, which is as `origin` before each fault."""

    def __init__(self, name: str, origin: Path, top: Path) -> None:
        self.words, self.resumes = COMMANDS[name], name == "resume"
        self.origin, self.place = origin, top / name.replace(" ", "-")
        self.place.mkdir()
        self.before = files(origin)
        self.run()
        self.whole, self.losses = self.now(), self._losses() if self.resumes else []
        self.calls = self._calls(str(top))

    def run(self, *inject: str) -> int:
        """The exit code of the command in a fresh copy of its folder."""
        shutil.rmtree(self.place / "here", ignore_errors=True)
        shutil.copytree(self.origin, self.place / "here", symlinks=True)
        return traced(self.place, self.words, *inject)

    def now(self) -> dict[str, str]:
        return files(self.place / "here")

    def _losses(self) -> list[tuple[int, float]]:
        lines = (self.place / "here/begun/metrics.jsonl").read_text().splitlines()
        return [(row["step"], row["loss"]) for row in map(json.loads, lines)]

    def _calls(self, top: str) -> list[tuple[str, int]]:
        """The calls on files below a folder, by their number among those of a name in a thread."""
        seen, calls = Counter[tuple[str, str]](), set()
        for line in (self.place / "trace").read_text().splitlines():
            if (found := re.match(r"(\d+) +(\w+)\((.*)", line)) is None:
                continue  # the end of a call, or of a process
            process, name, rest = found.groups()
            seen[process, name] += 1
            paths = [] if name in CONTENTS else re.findall(r'"([^"]+)"', rest)
            here = any(path.startswith(top) or path[0] != "/" for path in paths)
            if here if paths else top in rest:
                calls.add((name, seen[process, name]))
        return sorted(calls)

    def faults(self) -> list[tuple[str, int, str]]:
        return [(call, n, error) for call, n in self.calls for error in ERRORS[call]]

    def wrong(self, call: str, n: int, error: str) -> tuple[int, list[str]]:
        """The exit code after a fault, and what does not hold."""
        how = "signal=KILL" if error == KILL else f"error={error}"
        code = self.run("-e", f"inject={call}:{how}:when={n}")
        said, now = (self.place / "stderr").read_text(), self.now()
        killed = error == KILL and code == -signal.SIGKILL
        errors = sum(line.startswith(("error: ", "Usage: ")) for line in said.splitlines())
        found = [] if code in CODES or killed else [f"code {code}"]
        found += ["a traceback"] * ("Traceback" in said)
        found += [f"{errors} sentences"] * (code > 0 and errors != 1)
        if self.resumes:
            return code, found + self._unresumable(code, now)
        lost = sorted(name for name in self.before if now.get(name) != self.before[name])
        found += [f"lost or changed: {lost}"] * bool(lost)
        output, whole = (
            {name: value for name, value in each.items() if name.split("/")[0] == "out"}
            for each in (now, self.whole)
        )
        if output != (whole if code == 0 else {}):
            # A killed process may leave the empty folder that holds the name; an output is whole
            # where standard output, which comes last, takes no more.
            emptied = killed or call == "rmdir"
            accepted = [whole, {"out": ""}] if emptied else [whole] if "stdout" in said else []
            found += ["a part of the output"] * (output not in accepted)
        strays = sorted(now.keys() - self.before.keys() - output.keys())
        if strays and not killed and call not in ("unlink", "unlinkat", "rmdir"):
            found.append(f"left: {strays}")
        return code, found

    def _unresumable(self, code: int, now: Mapping[str, str]) -> list[str]:
        """Faults of the run, once it is resumed undisturbed, unless it has ended with 0."""
        mine = [name for name in self.before if name.split("/")[0] != "begun"]
        found = [f"lost or changed: {name}" for name in mine if now.get(name) != self.before[name]]
        if code:
            process = forked(self.place, self.words)
            os.kill(process, signal.SIGCONT)
            if code := os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]):
                said = (self.place / "stderr").read_text()[-300:]
                return [*found, f"it ends with {code}: {said}"]
        now = self.now()
        whole = [f"begun/{name}" for name in ("model.safetensors", "config.json")]
        found += [f"another {name}" for name in whole if now.get(name) != self.whole[name]]
        found += ["other losses"] * (self._losses() != self.losses)
        return found + [f"left: {name}" for name in now if LEFT.search(name)]


def prepare(origin: Path) -> None:
    """Makes the data and the runs, in children."""
    os.chdir(origin)
    for name in ("cat", "dog"):
        images(Path("data") / name)
    for split in ("train", "validation"):
        for kind, size in (("images", (32, 32, 3)), ("masks", (32, 32))):
            images(Path("shapes") / split / kind, most=2, size=size)
    Path("mine.txt").write_text("the user's")
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    SegformerForSemanticSegmentation(SegformerConfig(
        depths=[1] * 4, hidden_sizes=[8] * 4, num_attention_heads=[1] * 4, decoder_hidden_size=16
    )).save_pretrained("segformer")  # fmt: skip
    Path("segformer/preprocessor_config.json").write_text("{}")
    save_for_hf(create_model("test_resnet"), "resnet", safe_serialization=True)
    seg = ["finetune", "./segformer", "shapes", *QUICK, "--input-size", "32", "--steps", "1"]
    begin = ["finetune", "./resnet", "data", *QUICK, "--input-size", "32", *STEPS]
    child([*begin, "--out", "run"])
    child([*seg, "--out", "seg"])
    child([*begin, "--out", "begun"], saved=2)


def child(words: Sequence[str], saved: int | None = None) -> None:
    """Calls a command in a child, killed after the save of a step; imports what it has imported."""
    process = os.fork()
    if not process:
        save = Checkpoints.save

        def saving(self: Checkpoints, marker: Any, write: Callable[[Path], object]) -> None:
            save(self, marker, write)
            if marker["step"] == saved:
                os.kill(os.getpid(), signal.SIGKILL)

        Checkpoints.save = saving  # type: ignore[method-assign]
        code = called(words)
        Path("../modules").write_text("\n".join(list(sys.modules)))
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    assert code == (0 if saved is None else -signal.SIGKILL), (words, code)
    for name in Path("../modules").read_text().splitlines():
        with suppress(Exception):
            import_module(name)


def warm(words: Sequence[str]) -> None:
    """Calls a command here up to its first backward pass, after which autograd cannot be forked."""
    whole = Tensor.backward

    def backward(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    Tensor.backward = backward  # type: ignore[method-assign]
    code = called(words)
    Tensor.backward = whole  # type: ignore[method-assign]
    assert code in (0, 128 + signal.SIGINT), (words, code)


def main() -> None:
    parser = options(__doc__, "faults")
    parser.add_argument("--commands", nargs="+", default=list(COMMANDS), choices=COMMANDS)
    parser.add_argument("--every", type=int, default=1, help="one of so many faults")
    parser.add_argument("--calls", nargs="+", default=list(ERRORS), choices=ERRORS)
    args = parser.parse_args()
    if os.environ.get("OMP_NUM_THREADS") != "1":  # torch's threads do not survive a fork
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)
    os.environ |= {"HF_HUB_OFFLINE": "1", "PYDANTIC_DISABLE_PLUGINS": "1"}
    args.out = args.out.resolve()
    with tempfile.TemporaryDirectory() as folder:
        top = Path(folder)
        os.environ["XDG_CACHE_HOME"] = str(top / "cache")
        origin = top / "origin"
        origin.mkdir()
        prepare(origin)
        for name in args.commands:
            shutil.copytree(origin, top / "warm")
            os.chdir(top / "warm")
            warm(COMMANDS[name])
            os.chdir(origin)
            shutil.rmtree(top / "warm")
        gc.freeze()  # no child looks at the objects of libraries
        document = {**head(device_name(), "torch"), "commands": {}}
        for name in args.commands:
            case, bad = Case(name, origin, top), []
            faults = [fault for fault in case.faults() if fault[0] in args.calls][:: args.every]
            for fault in faults:
                code, found = case.wrong(*fault)
                if found:
                    bad.append([*fault, code, *found])
                    print(f"{name}: {bad[-1]}", flush=True)
            document["commands"][name] = {
                "calls": len(case.calls),
                "faults": len(faults),
                "wrong": bad,
            }
            print(f"{name}: {len(faults)} faults, {len(bad)} of them wrong", flush=True)
            write(args.out, document)
    sys.exit(any(row["wrong"] for row in document["commands"].values()))


if __name__ == "__main__":
    main()
