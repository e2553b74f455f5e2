"""The documents: their code runs, their links lead somewhere, their figures are true."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import razorctl
from razorctl.rules.registry import RULES, RuleEntry
from tests.cases import CASES
from tests.forked import Forked, program

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
OPS, RULES_PAGE = ROOT / "razorctl/ops/README.md", ROOT / "razorctl/rules/README.md"
# Pages on how to add something, each in the folder that it is about.
GUIDES = (*(ROOT / "razorctl").glob("*/README.md"), ROOT / "presets/README.md")
PAGES = (
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md"),
    *(str(page.relative_to(ROOT)) for page in sorted((ROOT / "scripts/bench").glob("*.md"))),
    *(str(page.relative_to(ROOT)) for page in sorted(GUIDES)),
)


def run(*command: str | Path, cwd: Path = ROOT, tree: Path = ROOT) -> str:
    """The output of a process that runs in a folder, with the code of a copy of this repository."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_readme_is_a_front_door():
    lines = README.read_text().splitlines()
    assert len(lines) <= 150
    assert max(map(len, lines)) <= 160


def test_contributing_the_changelog_and_the_guides_are_short():
    assert (ROOT / "CONTRIBUTING.md").stat().st_size <= 6000
    for page in (ROOT / "CHANGELOG.md", *GUIDES):
        lines = page.read_text().splitlines()
        assert len(lines) <= 60, page
        assert max(map(len, lines)) <= 120, page


def test_measurements_have_a_short_index_and_pages_of_short_lines():
    folder = ROOT / "scripts/bench"
    assert len((folder / "README.md").read_text().splitlines()) <= 60
    for page in folder.glob("*.md"):
        prose = [line for line in page.read_text().splitlines() if not line.startswith("|")]
        assert max(map(len, prose)) <= 120, page


def blocks(page: Path) -> list[str]:
    """The blocks of Python in a page."""
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


def test_the_loop_runs_as_printed(tmp_path):
    (loop,) = blocks(README)
    code, printed, errors = Forked(program, loop, folder=tmp_path).ended()
    assert code == 0, errors
    (share,) = re.findall(r"stored for backward: (.*)% of full fine-tuning", printed)
    assert 0 < float(share) <= 10
    losses = [float(loss) for loss in re.findall(r"loss (.*)", printed)]
    assert len(losses) == 5
    assert losses[-1] < losses[0]


def test_the_functions_run_as_printed(tmp_path, monkeypatch, traces, shallow):
    """On a small model, for a few steps."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(traces))
    text = README.read_text().replace('"vit-b16", "cifar100"', '"vit-micro", "digits"')
    text = text.replace("ratio=0.9)`", "ratio=0.9, steps=2, device='cpu')`")
    names = {"razorctl": razorctl}
    plan, train = re.findall(r"`(razorctl\.(?:plan|finetune)\(.*?\))`", text)
    assert eval(plan, names)["fits"]
    assert eval(train, names)["job"]["steps"] == 2


def test_the_op_of_the_guide_works_as_printed(tmp_path):
    """In a process of its own, since an op stays."""
    op, *_ = blocks(OPS)
    check = (
        f"__name__ = 'razorctl.ops.limits'\n{op}\n"
        "import torch\nfrom tests.references import opcheck\n"
        "opcheck(limited, (x := torch.randn(5, 7), 0.5))\n"
        "assert torch.equal(limited(x, 0.5), x.clamp(-0.5, 0.5))"
    )
    code, _, errors = Forked(program, check, folder=tmp_path).ended()
    assert code == 0, errors


def test_the_rule_of_the_guide_works_as_printed(monkeypatch):
    code, *_ = blocks(RULES_PAGE)
    names: dict[str, Any] = {"__name__": "signs"}
    exec(code, names)
    rule = names["Signs"]()
    x, dy = torch.randn(40, 33), torch.randn(40, 17)
    packed = rule.pack(x)
    back = packed.values()
    assert torch.equal(back.sign(), x.sign())
    assert torch.cosine_similarity(back.flatten(), x.flatten(), 0) > 0.7
    assert sum(t.numel() * t.element_size() for t in packed.tensors) == 40 * 33 // 8 + 33 * 4
    monkeypatch.setitem(RULES, "signs", RuleEntry(names["Signs"], lambda settings: rule))
    layer = CASES["linear"].layer("signs")
    layer(x).backward(dy)
    torch.testing.assert_close(layer.weight.grad, dy.T @ back)


def test_a_rule_added_as_the_guide_says_passes_the_tests_that_it_joins(tmp_path):
    """In a copy of the repository, into which each step writes."""
    for name in ("razorctl", "tests", "presets"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    code, entry, kept = blocks(RULES_PAGE)
    (tmp_path / "razorctl/rules/signs.py").write_text(code)
    rules, layers = "tests/rules/test_rules.py", "tests/layers/test_every_layer.py"
    for file, place, step in (
        (
            "razorctl/rules/registry.py",
            "from typing import Any\n",
            "from razorctl.rules.signs import Signs\n",
        ),
        ("razorctl/rules/registry.py", "RULES: dict[str, RuleEntry] = {\n", entry),
        (rules, "NAMES = (", '"signs", '),
        (rules, "BYTES = {\n", kept),
        (layers, "RULE_NAMES = (", '"signs", '),
    ):
        before, found, after = (tmp_path / file).read_text().partition(place)
        assert found
        (tmp_path / file).write_text(before + found + step + after)
    done = run(
        "-m", "pytest", "-n", "0", "-q", "-k", "signs", rules, layers, cwd=tmp_path, tree=tmp_path
    )
    assert int(re.findall(r"(\d+) passed", done)[0]) > 100


@pytest.mark.parametrize(
    "script",
    ["bench/report.py", "bench/picture.py", "bench/terminal.py", "assets/list_models.py"],
)
def test_figures_are_those_of_the_results(script):
    run(ROOT / "scripts" / script, "--check")


def anchors(page: Path) -> set[str]:
    """The names by which the headings of a page are linked to."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_local_links_lead_somewhere(page):
    text = (ROOT / page).read_text()
    links = re.findall(r"\]\(([^)]+)\)|src(?:set)?=\"([^\"]+)\"", text)
    for link in filter(None, (target for pair in links for target in pair)):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link
