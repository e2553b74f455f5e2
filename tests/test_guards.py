"""What holds for the whole tree: import levels, a light --help, the test harness itself."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import pytest_socket
import torch

PACKAGE = Path(__file__).parents[1] / "razorctl"
LEVELS = {
    "errors": 0,
    "allocation": 1,
    "hub": 1,
    "registry": 1,
    "settings": 1,
    "presets": 1,
    "rundir": 1,
    "signals": 1,
    "traces": 1,
    "costs": 2,
    "devices": 1,
    "ops": 0,
    "job": 2,
    "sampling": 1,
    "rules": 2,
    "recipe": 2,
    "effects": 3,
    "layers": 3,
    "branches": 3,
    "adapters": 3,
    "checkpointing": 3,
    "families": 4,
    "surgery": 5,
    "data": 5,
    "memory": 5,
    "gpus": 5,
    "promise": 6,
    "step": 6,
    "tracing": 7,
    "search": 8,
    "planner": 9,
    "profiler": 8,
    "trainer": 7,
    "comparison": 9,
    "grid": 10,
    "views": 11,
    "comparison_view": 12,
    "profile_view": 12,
    "progress": 12,
    "cli": 13,
    "__main__": 14,
}


def imported(file: Path) -> set[str]:
    """The first-level razorctl modules that a file imports anywhere, TYPE_CHECKING or not."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        found |= {n.split(".")[1] for n in names if n.startswith("razorctl.")}
    return found & {path.stem for path in PACKAGE.iterdir()}


@pytest.mark.parametrize(
    "file", sorted(PACKAGE.rglob("*.py")), ids=lambda f: f.relative_to(PACKAGE).as_posix()
)
def test_imports_go_to_a_lower_level(file: Path):
    own = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if own == "__init__":
        return  # the public API: lazy, and test_help_imports_no_torch holds it to that
    for name in imported(file) - {own}:
        assert LEVELS[name] < LEVELS[own], f"{file.name} imports {name}"


def test_every_module_has_a_level():
    modules = {
        p.stem for p in PACKAGE.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()
    }
    assert modules - {"__init__"} == set(LEVELS)


@pytest.mark.parametrize(
    "args",
    [
        ["--help"],
        ["finetune", "--help"],
        ["profile", "--help"],
        ["compare", "--help"],
        ["--version"],
    ],
)
def test_help_imports_no_torch(args: list[str]):
    code = (
        "import sys; from razorctl.cli import app\n"
        f"try: app({args!r})\n"
        "except SystemExit as stop: assert not stop.code, stop.code\n"
        "assert not {'torch', 'timm', 'datasets', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_a_model_loads_no_other_library_after_its_own():
    code = (
        "import sys; from razorctl import families\n"
        "assert families.find('vit-b16').name == 'vit-b16'\n"
        "assert 'transformers' not in sys.modules\n"
        "assert 'bert-base' in families.models()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_library_that_fails_to_load_says_so_again():
    code = (
        "import sys; sys.modules['timm'] = None\n"
        "from razorctl import families\n"
        "for _ in range(2):\n"
        "    try: families.find('vit-b16')\n"
        "    except ImportError as error: assert 'timm' in str(error)\n"
        "    else: raise AssertionError"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_public_names_are_all_there():
    import razorctl

    for name in razorctl.__all__:
        assert getattr(razorctl, name).__doc__
    assert dir(razorctl) == sorted([*razorctl.__all__, "__version__"])
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = razorctl.nothing_of_the_kind


def test_empty_is_poisoned():
    assert torch.empty(3).isnan().all()
    assert torch.zeros(2, 3).new_empty(4).isnan().all()


@pytest.mark.filterwarnings("ignore:A test tried to use socket")
def test_no_network():
    import socket

    with pytest.raises(pytest_socket.SocketConnectBlockedError):
        socket.create_connection(("192.0.2.1", 80), timeout=1)
