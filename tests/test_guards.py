"""Rules for the whole tree: import levels, sentences, sizes, a light --help, the test harness."""

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import pytest_socket
import torch

from razorctl.cli.app import COMMANDS
from razorctl.models.transformers.pretrained_files import NO_CODE

PACKAGE = Path(__file__).parents[1] / "razorctl"
# From the bottom; what stands in one line knows nothing of each other.
FLOORS = (
    ("errors", "units", "version"),
    ("registry", "system"),
    ("methods", "ops"),
    ("sampling",),
    ("rules",),
    ("config",),
    ("optimizer", "step"),
    ("layers", "models"),
    ("data", "memory"),
    ("surgery",),
    ("planning",),
    ("training",),
    ("api", "cli", "finished"),
    ("__main__",),
)
LEVELS = {room: level for level, floor in enumerate(FLOORS) for room in floor}


def room_of(name: str) -> str:
    """The room of a first-level module; functions are of the room whose commands call them."""
    return "cli" if name in ("api", "finished") else name


@cache
def nodes(file: Path) -> list[ast.AST]:
    """All that a file says, which several tests walk through."""
    return [*ast.walk(ast.parse(file.read_text()))]


def imported(file: Path) -> set[str]:
    """The first-level razorctl modules that a file imports anywhere, TYPE_CHECKING or not."""
    modules = set()
    for node in nodes(file):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            assert "razorctl" not in names, f"{file}: the root imports from every floor"
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        modules |= {n.split(".")[1] for n in names if n.startswith("razorctl.")}
    return {room_of(name) for name in modules & {path.stem for path in PACKAGE.iterdir()}}


# The public API imports from every floor, lazily: test_what_needs_no_model_imports_no_torch.
FILES = [file for file in sorted(PACKAGE.rglob("*.py")) if file != PACKAGE / "__init__.py"]


def test_imports_go_to_a_lower_floor():
    upward = [
        f"{file.relative_to(PACKAGE)} imports {name}"
        for file in FILES
        for room in [room_of(file.relative_to(PACKAGE).parts[0].removesuffix(".py"))]
        for name in sorted(imported(file) - {room})
        if LEVELS[name] >= LEVELS[room]
    ]
    assert not upward


def test_no_call_of_transformers_may_run_foreign_code():
    """transformers asks on standard input whether it may, unless it is told that it may not."""
    calls = 0
    for file in FILES:
        for node in nodes(file):
            name = getattr(getattr(node, "func", None), "attr", "")
            if isinstance(node, ast.Call) and name in (
                "from_pretrained",
                "from_config",
                "pipeline",
            ):
                assert "NO_CODE" in {getattr(k.value, "id", "") for k in node.keywords}, file
                calls += 1
    assert calls >= 4
    assert NO_CODE == {"trust_remote_code": False}


# What lies in the package, and what users have written.
FOREIGN_JSON = (
    "rules/allocation.py",
    *(f"data/own/{name}.py" for name in ("chats", "contents", "labels", "read/lines")),
    "data/own/read/boxes/coco.py",
)


def test_documents_alone_reads_and_writes_json():
    for file in FILES:
        name = file.relative_to(PACKAGE).as_posix()
        if name == "system/documents.py" or name.startswith(FOREIGN_JSON):
            continue
        for node in nodes(file):
            names = [alias.name for alias in getattr(node, "names", ()) if hasattr(alias, "name")]
            module = getattr(node, "module", None)
            assert "json" not in ({*names, module} if names else ()), file


def modules_of(room: str) -> dict[str, set[str]]:
    """The modules of a room by name, each with those of the room that it imports anywhere."""
    tops = {f: f.relative_to(PACKAGE).parts[0].removesuffix(".py") for f in FILES}
    files = [f for f, top in tops.items() if room_of(top) == room]
    names = {".".join(f.with_suffix("").relative_to(PACKAGE).parts): f for f in files}
    names = {name.removesuffix(".__init__"): file for name, file in names.items()}

    def imports(file: Path) -> Iterator[str]:
        for node in nodes(file):
            if isinstance(node, ast.ImportFrom):
                module = str(node.module).removeprefix("razorctl").removeprefix(".")
                for alias in node.names:
                    inner = f"{module}.{alias.name}".removeprefix(".")
                    yield inner if inner in names else module

    return {name: {*imports(file)} & names.keys() - {name} for name, file in names.items()}


@pytest.mark.parametrize("room", sorted(LEVELS))
def test_no_modules_of_a_room_import_each_other(room: str):
    left = modules_of(room)
    while done := {name for name, others in left.items() if not others & left.keys()}:
        left = {name: others for name, others in left.items() if name not in done}
    assert not left


def test_every_room_has_a_floor():
    modules = {
        p.stem for p in PACKAGE.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()
    }
    assert modules - {"__init__"} == set(LEVELS)


ROOT = PACKAGE.parent
EVERY_FILE = [f for name in ("razorctl", "tests", "scripts") for f in (ROOT / name).rglob("*.py")]


def test_no_two_public_classes_have_one_name():
    names = Counter(
        node.name
        for file in FILES
        for node in nodes(file)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert not {name for name, count in names.items() if count > 1}


LONGEST_FILE, LONGEST_FUNCTION = 400, 60  # lines


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The lines of a function, but for its signature, which may hold a command's options."""
    assert function.end_lineno is not None
    return function.end_lineno - function.body[0].lineno + 2


def test_files_and_functions_are_short():
    long = []
    for file in EVERY_FILE:
        name = file.relative_to(ROOT).as_posix()
        lines = file.read_text().splitlines()
        if file.is_relative_to(PACKAGE) and len(lines) > LONGEST_FILE:
            long.append(name)
        functions = (
            node for node in nodes(file) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        )
        long += [f"{name}: {each.name}" for each in functions if length(each) > LONGEST_FUNCTION]
    assert not long


LIGHT = {
    "--help": 0,
    **{f"{name} --help": 0 for name in COMMANDS},
    "evaluate nothing": 2,
    "predict nothing image.jpg": 2,
    "chat nothing": 2,
    "export nothing": 2,
    "--version": 0,
    "list": 0,
    "list --json": 0,
    "finetune vit-mikro digits": 2,
    "finetune vit-micro digit": 2,
    "finetune bert-base digits": 2,
    "finetune vit-micro digits --method razr": 2,
    "finetune vit-micro digits --ratio 1": 2,
    "finetune vit-micro digits --batch-size 0": 2,
    "finetune vit-micro digits --batch-size 1438": 2,
    "profile vit-mikro": 2,
    "profile vit-micro --method razr": 2,
    "profile vit-micro --batch-size 0": 2,
    "profile vit-micro --steps 0": 2,
    "plan vit-mikro digits --gpu t4": 2,
    "plan vit-micro digits --gpu t5": 2,
    "plan vit-micro digits --gpu t4 --batch-size 1438": 2,
    "compare vit-mikro digits": 2,
    "compare vit-micro digits --methods razr": 2,
}


def test_what_needs_no_model_imports_no_torch(tmp_path):
    code = (
        "import sys; from razorctl.cli.app import app\n"
        f"for words, code in {LIGHT!r}.items():\n"
        "    try: app(words.split())\n"
        "    except SystemExit as stop: assert stop.code == code, (words, stop.code)\n"
        "    heavy = {'torch', 'timm', 'datasets', 'numpy', 'huggingface_hub', 'matplotlib',"
        " 'jinja2'} & set(sys.modules)\n"
        "    if '--help' in words:\n"
        "        heavy |= {'pydantic', 'razorctl.data', 'razorctl.models'} & set(sys.modules)\n"
        "    assert not heavy, (words, heavy)"
    )
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent), "XDG_CACHE_HOME": str(tmp_path)}
    environment["CC"] = "false"  # or kernels are compiled meanwhile
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_layers_of_torch_load_neither_its_compiler_nor_a_library():
    code = (
        "import sys; from torch import nn; import razorctl\n"
        "net = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2))\n"
        "assert razorctl.sparsify(net)\n"
        "assert not {'torch._dynamo', 'timm', 'transformers'} & set(sys.modules)\n"
        "from razorctl import models\n"
        "razorctl.sparsify(models.find('vit-micro').bare(2, None))\n"
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_public_names_are_all_there():
    import razorctl

    for name in razorctl.__all__:
        assert getattr(razorctl, name).__doc__
    assert dir(razorctl) == sorted([*razorctl.__all__, "__version__", "list"])
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


# Words that a newcomer would have to learn, and constructions that hide their subject.
HOUSE_WORDS = re.compile(
    r"\bfull's\b|\b(?:that|those) of\b|\b(?:kept|keeps) for backward\b"
    r"|\b(?:makes?|made|runs|would run) (?:\w+ )?again\b|(?<![Tt]here )\b(?:is|are) no (?!longer\b)"
)
HOUSE_SENTENCES = (
    "20 % of full's bytes",
    "a peak below those of razor",
    "blocks that would run again",
    "makes it again",
    "the label is no number",
)
# Pages with prose for users; lines of tables have older results.
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "scripts" / "bench").glob("*.md")),
]


def texts(file: Path) -> Iterator[str]:
    """The strings of a file that users may read, with {} for values; docstrings are help in cli."""
    code = file.relative_to(PACKAGE).parts[0] not in ("cli", "api.py", "finished.py")
    silent = {id(node.value) for node in nodes(file) if isinstance(node, ast.Expr) and code}
    for node in nodes(file):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(getattr(part, "value", "")) for part in node.values)
        elif isinstance(node, ast.Constant) and id(node) not in silent:
            yield str(node.value)


def test_users_read_the_words_of_the_field():
    assert all(HOUSE_WORDS.search(sentence) for sentence in HOUSE_SENTENCES)
    said = [(file, text) for file in FILES for text in texts(file)]
    for page in PAGES:
        prose = re.sub(r"^\|.*\n", "", page.read_text(), flags=re.MULTILINE)
        said += [(page, paragraph) for paragraph in prose.split("\n\n")]
    found = ((file, HOUSE_WORDS.search(" ".join(text.split()))) for file, text in said)
    assert not [
        (file.name, word.string[max(0, word.start() - 40) :]) for file, word in found if word
    ]


# Functions that write where nothing of a user's can be: into a folder that was just made for them.
MADE = {
    "data/own/read/hub.py:_origin",
    "models/image_model.py:write",
    "models/transformers/detection.py:save",
    "models/transformers/embedding.py:save",
    "models/transformers/towers.py:save",
    "models/transformers/vision.py:save",
    "training/exporting/folder.py:write",
    "training/state.py:write",
}
# And those with a file that is theirs alone.
OWN = {
    "system/atomic.py:check_room",
    "system/c_compiler.py:_compiled",  # of tempfile, as a loaded library is to be its owner's
    "cli/views/common.py:mute",  # the null device
    "training/metrics.py:__init__",  # that it has written, whose lines follow
}


def writes(file: Path) -> list[str]:
    """The functions of a file that open another one to write, outside a block of `atomic`."""
    found = []

    def visit(node: ast.AST, function: str, safe: bool) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            function, safe = node.name, False
        if isinstance(node, ast.With):
            safe |= any("atomic_f" in ast.unparse(item.context_expr) for item in node.items)
        if isinstance(node, ast.Call) and not safe:
            name = ast.unparse(node.func).rpartition(".")[2]
            modes = [a.value for a in node.args if isinstance(a, ast.Constant)]
            modes += [getattr(k.value, "value", "w") for k in node.keywords if k.arg == "mode"]
            opens = name in ("open", "fdopen") and any(
                isinstance(mode, str) and set(mode) & set("wax+") and len(mode) < 4
                for mode in modes
            )
            if opens or name in ("write_text", "write_bytes", "mkstemp", "NamedTemporaryFile"):
                found.append(f"{file.relative_to(PACKAGE)}:{function}")
        for child in ast.iter_child_nodes(node):
            visit(child, function, safe)

    visit(nodes(file)[0], "", False)
    return found


def test_files_are_written_by_atomic_alone():
    assert {name for file in FILES for name in writes(file)} == MADE | OWN
