import gc
import json
import os
import random
import shutil
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# Before any import of a library that reads them.
os.environ["HF_HUB_OFFLINE"] = "1"
# Of processes that tests start; threads of several of them would wait for each other.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.pop("FORCE_COLOR", None)
os.environ.pop("COLUMNS", None)  # processes of pytest-xdist have it
os.environ.pop("LINES", None)

import pytest
import torch
from torch import nn

gc.disable()  # until all tests are imported, which leaves no garbage
torch.set_num_threads(1)  # tests are small, and processes run them side by side
os.fsync = lambda _: None  # no test takes the power away
gc.get_freeze_count = lambda: 1  # below much is hidden, over all of which the stock one walks
# The stock one empties the processor's cache for each graph that is compiled, to tell a log a time.
torch._C._dynamo.guards.profile_guard_manager = lambda *_: 0.0
if not torch.accelerator.is_available():
    # The stock one formats its whole stack for each kind of device, for the day that one is there.
    torch.manual_seed = torch.default_generator.manual_seed


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every-variant",
        action="store_true",
        help="compile all that each Triton kernel may be launched as, not only what takes most",
    )
    parser.addoption(
        "--program-order",
        choices=("reverse", "shuffle"),
        help="run the programs of interpreted Triton kernels in this order, not from first to last",
    )
    parser.addoption(
        "--few",
        type=int,
        metavar="N",
        help="run at most N cases of each test, drawn at random, the same ones each time",
    )
    parser.addoption(
        "--write-forwards",
        action="store_true",
        help="add the forwards of the installed releases to razorctl/layers/known_forwards.json",
    )
    parser.addoption("--rows", metavar="FILE", help="write how each test ended to a JSON file")


def pytest_collectstart(collector: pytest.Collector) -> None:
    """A module's random constants are the same in each run."""
    torch.manual_seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Flags of pytest-socket, which would be unknown to pytest where it is not installed."""
    config.option.disable_socket = config.option.allow_unix_socket = True
    config.option.allow_hosts = "127.0.0.1,::1"
    file = config.getoption("--rows")
    if file and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Rows(Path(file)))


@pytest.fixture(autouse=True)
def _untraced_first_passes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """First passes after `sparsify` are not traced, which takes a test's time, but where it is."""
    module = sys.modules.get("razorctl.surgery.sparsify")
    if module is not None and request.path.name != "test_excess.py":
        monkeypatch.setattr(module, "tell_excess", untold)


def untold(model: nn.Module, *_: Any) -> None:
    """A hook in place of `tell_excess` that only removes itself."""
    if not torch.compiler.is_compiling():
        sys.modules["razorctl.surgery.drawing"].unhook(model, untold)


class Rows:
    """How each test ended, in a JSON file each second, since a limit on time may end the run."""

    def __init__(self, file: Path) -> None:
        self.file, self.rows, self.written = file, dict[str, dict[str, Any]](), 0.0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        crash = getattr(report.longrepr, "reprcrash", None) if report.failed else None
        why = (crash.message if crash else str(report.longrepr))[:300] if report.failed else None
        self.rows[report.nodeid] = {
            "outcome": report.outcome,
            "seconds": round(report.duration, 2),
            "error": why,
        }
        if time.monotonic() > self.written + 1:  # thousands of rows take longer than a test
            self.pytest_sessionfinish()

    def pytest_sessionfinish(self) -> None:
        self.written = time.monotonic()
        partial = self.file.with_suffix(".partial")
        partial.write_text(json.dumps({"rows": self.rows}, indent=1) + "\n")
        partial.replace(self.file)


# Files of few tests that take long; pytest-xdist would begin them last, and then wait for one.
LONG = (
    *("tests/test_examples.py", "layers/test_compiled_memo.py", "ops/triton/test_compiled.py"),
    *("cli/test_front.py", "cli/test_chats.py", "cli/test_tasks.py", "tests/test_readme.py"),
    *("training/test_processes.py", "training/test_full_disk.py"),
    *("training/test_recovery.py", "tests/test_bare.py", "tests/test_packaging.py"),
    "triton/test_in_flight.py",
)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Draws a few cases of each test, of those that -k and -m leave."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        sizes = Counter(item.path for item in items)
        items.sort(key=lambda item: (not str(item.path).endswith(LONG), -sizes[item.path]))
    most = config.getoption("--few")
    if most is None:
        return
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    drawn = {
        item
        for name, of_test in cases.items()
        for item in random.Random(name).sample(of_test, min(most, len(of_test)))
    }
    config.hook.pytest_deselected(items=[item for item in items if item not in drawn])
    items[:] = [item for item in items if item in drawn]


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    yield
    gc.freeze()  # or each collection looks through all that was imported
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def frozen():
    """And through what other modules have imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def no_pictures(request):
    """Runs leave no curves and predictions, which take a second, but where they are tested."""
    with pytest.MonkeyPatch.context() as patch:
        if request.path.name != "test_pictures.py":
            patch.setattr("razorctl.cli.pictures.leave", lambda _: None)
        yield


@pytest.fixture(params=["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every device there is, so that one command tests a GPU machine too."""
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def poisoned_empty():
    """torch.empty and its kin hand out NaN, so that reading what nothing wrote is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.allow_tf32 = False  # or convolutions round where GEMMs do not
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def kernels_run():
    """A kernel that fails is an error in a test, though its op then runs as PyTorch operations."""
    yield
    from razorctl.ops import kernels

    failures = kernels.failures()
    kernels._failed.clear()
    kernels._failed_ways.clear()
    kernels._off.clear()
    assert not failures


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def traces(tmp_path_factory):
    """The folder of a cache of traces that all tests of a session share; see tests.models.

    Processes that tests start find the compiled kernels of this one there.
    """
    from razorctl.system import c_compiler

    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "traces"
    if library := c_compiler.built().path:
        kernels = folder / "razorctl" / "kernels"
        kernels.mkdir(mode=0o700, parents=True, exist_ok=True)
        shutil.copy(library, kernels)
    return folder


@pytest.fixture(scope="module")
def shallow():
    """vit-micro has two of its six blocks in this process, untrained, and digits is tested less."""
    from tests.models import registered

    with registered(shallow=True):
        yield


@pytest.fixture
def runs_here(monkeypatch):
    """The runs of a comparison are taken in this process; one of test_grid.py starts its own."""
    from tests.comparing import call_here

    monkeypatch.setattr("razorctl.training.comparing.grid.run_child", call_here)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """razorctl's ops go through tensors on the CPU in the parts that they take on a GPU."""
    from scripts.bench import planning

    planning.as_on_a_gpu(monkeypatch.setattr)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """An empty cache of the hub, which cannot be reached; tests.local_hub fills it."""
    import datasets
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "home" / "datasets")
    return tmp_path / "home" / "hub"


@pytest.fixture
def faults():
    """Faults of the server: files need a login, or so many are cut off in the middle.

    answers: path -> the status that the server answers with.
    """
    return SimpleNamespace(gated=False, cuts=0, answers={})


@pytest.fixture
def server(hub, tmp_path, monkeypatch, faults):
    """A hub at 127.0.0.1 that has what tests put into the folder returned, as a cache has it."""
    import datasets
    from huggingface_hub import constants

    from tests.hub_server import serving

    there = tmp_path / "there"
    with serving(there, faults) as url:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", url)
        template = url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield there


@pytest.fixture(scope="module")
def vit() -> tuple[nn.Module, torch.Tensor]:
    """ViT-B/16 and a batch of 128 images of 224 px, for traces, which need no values."""
    import timm

    from razorctl.memory.fake_mode import TraceMode

    with TraceMode():
        x = torch.empty(128, 3, 224, 224)
    with torch.device("meta"):
        return timm.create_model("vit_base_patch16_224", num_classes=100), x


@pytest.fixture(scope="module")
def bert() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """BERT-base and a batch of 32 texts of 128 tokens, for traces, which need no values."""
    from transformers import BertConfig, BertForSequenceClassification

    from razorctl.memory.fake_mode import TraceMode

    with TraceMode():
        ids = torch.zeros(32, 128, dtype=torch.long)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with torch.device("meta"):
        return BertForSequenceClassification(BertConfig()), inputs
