"""Nothing of a user's is changed or lost by any option that names an output.

Every such option is found in the registry of commands, so that a new one without a case fails here.
"""

import errno
import os
import resource
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from razorctl import models
from razorctl.cli.app import COMMANDS, app, loaded
from razorctl.cli.views import report
from razorctl.system import atomic
from tests.cli.commands import razorctl
from tests.own import photos

CPU = ["--device", "cpu"]
TRAIN = ["vit-micro", "photos", "--batch-size", "4", "--steps", "1", *CPU]
PROFILED = ["vit-micro", "--batch-size", "1", "--steps", "1"]
# A command, its option that names an output, and what it writes there -> the words before OUT.
CASES = {
    "predict --out": ["predict", "RUN", "photos", *CPU, "--out"],
    "predict --out of masks": ["predict", "MASKS", "photos", *CPU, "--out"],
    "export --out": ["export", "RUN", "--out"],
    "finetune --out": ["finetune", *TRAIN, "--out"],
    "finetune --out of --resume": ["finetune", *TRAIN, "--resume", "--out"],
    "compare --out": ["compare", *TRAIN, "--out"],
    "compare --html": ["compare", "RUN", "--html"],
    "profile --trace": ["profile", *PROFILED, *CPU, "--trace"],
    "profile --snapshot": ["profile", *PROFILED, *CPU, "--snapshot"],
}  # fmt: skip
INPUTS = {"finetune --plan", "export --llama-cpp"}
ELSEWHERE = {"predict --draw"}  # tried with a detector in test_detection.py
REPLACED = ("profile --trace", "profile --snapshot")  # a regular file, on purpose


def named_outputs() -> set[str]:
    """The options of all commands whose value is a file or a directory."""
    return {
        f"{name} {each.opts[0]}"
        for name in COMMANDS
        for each in loaded(name).params
        if each.param_type_name == "option" and each.metavar in ("FILE", "DIR")
    }


def test_every_option_that_names_an_output_is_tried():
    assert {" ".join(case.split()[:2]) for case in CASES} == named_outputs() - INPUTS - ELSEWHERE


@pytest.fixture(scope="module")
def runs(kinds, traces, shallow) -> Path:
    """A folder with photos, a finished run on them, and one that gives masks."""
    photos(kinds / "photos", 4, ("cat", "dog"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(traces))
        patch.chdir(kinds)
        for words in (
            [*TRAIN, "--out", "run"],
            ["./resnet", "shapes", *TRAIN[2:], "--input-size", "32", "--out", "masks"],
        ):
            done = razorctl("finetune", *words, "--method", "full")
            assert done.exit_code == 0, done.stderr
    return kinds


@pytest.fixture
def call(runs) -> Callable[[str], Result]:
    """Runs a case in a folder of its own, which has files of the user's."""
    Path("photos").symlink_to(runs / "photos")
    for name in ("mine", "mine too"):
        Path(name).write_text(f"{name} {name}")
    Path("folder").mkdir()
    Path("folder/file").write_text("in a folder")
    places = {"RUN": str(runs / "run"), "MASKS": str(runs / "masks")}

    def called(case: str) -> Result:
        return CliRunner().invoke(app, [*(places.get(w, w) for w in CASES[case]), "out"])

    return called


def everything() -> dict[str, object]:
    """All that is here: type, rights and what is in it; files that are the same one are that."""
    found: dict[str, object] = {}
    for path in sorted(Path().rglob("*")):
        status = path.lstat()
        inside: object = None
        if stat.S_ISREG(status.st_mode):
            inside = status.st_ino, path.read_bytes()
        elif path.is_symlink():
            inside = path.readlink()
        found[str(path)] = status.st_mode, inside
    return found


def assert_refused(result: Result, why: str) -> None:
    """Asserts one sentence with a reason, no traceback, and the exit code of usage."""
    assert result.exit_code == 2, (result.exit_code, result.output, result.exception)
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, result.stderr
    assert "Traceback" not in result.output
    assert why in errors[0] or "a memory snapshot needs a CUDA device" in errors[0]


PLANTS: dict[str, Callable[[Path], object]] = {
    "file": lambda path: path.write_text("planted"),
    "link": lambda path: path.symlink_to("mine"),
    "link to nothing": lambda path: path.symlink_to("nowhere"),
    "link to a folder": lambda path: path.symlink_to("folder"),
    "hard link": lambda path: path.hardlink_to("mine"),
    "fifo": os.mkfifo,
    "folder": lambda path: Path("folder").rename(path),
}
# Each case meets some plants, and each plant some cases; test_atomic.py has all plants.
PAIRS = [(c, p) for n, c in enumerate(CASES) for m, p in enumerate(PLANTS) if (n + m) % 4 == 0]


@pytest.mark.parametrize(("case", "plant"), PAIRS)
def test_what_is_there_stays(case, plant, call):
    PLANTS[plant](Path("out"))
    before = everything()
    if case in REPLACED and plant == "file":
        return  # which is what they replace
    if case in REPLACED and plant in ("link", "hard link"):
        call(case)  # which may replace the name, but not what it shares
        assert before.items() - {("out", before["out"])} <= everything().items()
        return
    assert_refused(call(case), "exists already" if "resume" not in case else "out")
    assert everything() == before


@pytest.mark.parametrize(("case", "plant"), [pair for pair in PAIRS if pair[0] not in REPLACED])
def test_what_appears_meanwhile_stays(case, plant, call, monkeypatch):
    """The command has seen that nothing is there, and is about to publish."""
    planted, before = list[bool](), list[dict[str, object]]()

    def planting(act: Callable[..., None], at: int) -> Callable[..., None]:
        def acts(*paths: object, **settings: object) -> None:
            # The folder of masks is also made once before, to see whether it can be made.
            publishes = "masks" not in case or [*Path().glob(".razorctl-*/classes.txt")]
            if str(paths[at]) == "out" and publishes and not planted:
                planted.append(True)
                PLANTS[plant](Path("out"))
                before.append({k: v for k, v in everything().items() if k[0] != "."})
            act(*paths, **settings)

        return acts

    monkeypatch.setattr(os, "link", planting(os.link, 1))
    monkeypatch.setattr(os, "mkdir", planting(os.mkdir, 0))
    assert_refused(call(case), "out exists already")
    assert before == [everything()]


REFUSALS = {"no rights": errno.EACCES, "read-only": errno.EROFS, "no inodes": errno.ENOSPC}


@pytest.mark.parametrize("why", REFUSALS)
@pytest.mark.parametrize("case", CASES)
def test_a_directory_that_takes_no_new_name(case, why, call, monkeypatch):
    """By the system calls, since root has all rights."""
    before, reason = everything(), os.strerror(REFUSALS[why])

    def failing(act: Callable[..., object]) -> Callable[..., object]:
        def acts(path: object, *rest: int, **settings: object) -> object:
            makes = act is not opens or bool(rest and rest[0] & os.O_CREAT)
            if makes and not Path(str(path)).is_absolute():
                raise OSError(REFUSALS[why], reason, str(path))
            return act(path, *rest, **settings)

        return acts

    opens = os.open
    for name in ("open", "mkdir", "link", "symlink"):
        monkeypatch.setattr(os, name, failing(getattr(os, name)))
    assert_refused(call(case), f"cannot write out ({reason}); name another")
    assert everything() == before


@pytest.mark.parametrize("case", CASES)
def test_a_disk_that_is_full(case, call, monkeypatch):
    """No file may have more than a few bytes, whatever library writes it."""
    before, limits = everything(), resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setattr(atomic, "ROOM", 0)  # so that the output itself finds it
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, limits[1]))
    try:
        done = call(case)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert_refused(done, f"({'No space left on device' if 'trace' in case else 'File too large'})")
    assert everything() == before


WRITES = ("predict --out", "predict --out of masks", "export --out", "compare --html")
CHANGES = ("open", "mkdir", "link", "replace", "chmod", "fsync", "unlink", "rmdir")


class Fault:
    """Makes the n-th call of the system fail that changes something here, while it is in place."""

    def __init__(self, n: int) -> None:
        self.left, self.name = n, ""

    def failing(self, name: str) -> Callable[..., object]:
        act = getattr(os, name)

        def acts(path: object, *rest: object, **settings: object) -> object:
            flags = rest[0] if rest and name == "open" else os.O_CREAT
            here = isinstance(path, int) or not Path(str(path)).is_absolute()
            if here and isinstance(flags, int) and flags & os.O_CREAT:
                self.left -= 1
                if not self.left:
                    self.name = name
                    raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            return act(path, *rest, **settings)

        return acts


@pytest.mark.parametrize("case", WRITES)
def test_every_call_that_writes_may_fail(case, call, monkeypatch):
    """The n-th one, for every n until a command ends without a fault."""
    for module, name in ((report.plots, "curves"), (report, "_memory_time")):
        monkeypatch.setattr(module, name, lambda *_: " ")  # takes long, and writes nothing here
    before, failed = everything(), set()
    for n in range(1, 40):
        fault = Fault(n)
        with pytest.MonkeyPatch.context() as patch:
            for name in CHANGES:
                patch.setattr(os, name, fault.failing(name))
            done = call(case)
        if done.exit_code:
            assert_refused(done, "cannot write out (Input/output error)")
            left = everything()
            if fault.name in ("unlink", "rmdir"):  # what cannot be removed
                left = {k: v for k, v in left.items() if k != "out" and not atomic.LEFT.match(k)}
            assert left == before, fault.name
        else:
            assert Path("out").exists()
            if not fault.name:
                break
            shutil.rmtree("out") if Path("out").is_dir() else Path("out").unlink()
        for path in [*Path().glob(".razorctl-*"), *Path().glob("out")]:
            path.rmdir() if path.is_dir() else path.unlink()
        failed.add(fault.name)
    assert not fault.name
    assert failed >= ({"mkdir", "fsync"} if Path("out").is_dir() else {"open", "link", "fsync"}), (
        failed
    )


def test_the_heads_that_timm_has_not_are_exported(call, monkeypatch):
    monkeypatch.setitem(CASES, "export", ["export", "MASKS", "--out"])
    done = call("export")
    assert done.exit_code == 0, done.output
    assert sorted(file.name for file in Path("out").iterdir()) == [
        *("README.md", "config.json", "model.safetensors")
    ]
    card = Path("out/README.md").read_text()
    assert "library_name: razorctl\n" in card
    assert "pipeline_tag: image-segmentation\n" in card
    assert "## Use" not in card  # no library has a call for it
    model, _ = models.find("./out").load(Path("out"))
    assert model.eval()(torch.zeros(1, 3, 32, 32)).shape == (1, 2, 32, 32)


def test_a_folder_that_cannot_be_listed_is_not_left_out(call, monkeypatch):
    """The disk fails once, below the folder that is named."""
    scandir = os.scandir

    def fails(path: str) -> object:
        if str(path).endswith("cat"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", fails)
    done = call("predict --out")
    assert done.exit_code == 5, done.output
    assert "error: photos/cat cannot be read (Input/output error)" in done.stderr
    assert not Path("out").exists()


def test_too_many_open_files_are_no_fault_of_a_file(call, monkeypatch):
    opens = os.open

    def fails(path: object, *rest: int) -> int:
        if str(path).endswith("result.json"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
        return opens(path, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", fails)
    done = call("predict --out")
    assert done.exit_code == 1, done.output
    assert "result.json'; raise the limit with `ulimit -n`." in done.stderr
