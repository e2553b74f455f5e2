"""What the README promises: its script runs, its links lead somewhere, its figures are true."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = ("README.md", "CONTRIBUTING.md", "scripts/bench/README.md")


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_readme_is_a_front_door():
    assert len(README.read_text().splitlines()) <= 150


def test_the_script_runs_as_printed(tmp_path):
    (script,) = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE)
    printed = run("-c", script, cwd=tmp_path)
    (share,) = re.findall(r"saved for backward: (.*)% of full's", printed)
    assert 0 < float(share) <= 10
    losses = [float(loss) for loss in re.findall(r"loss (.*)", printed)]
    assert len(losses) == 5
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("script", ["report.py", "picture.py"])
def test_figures_are_those_of_the_results(script):
    run(ROOT / "scripts/bench" / script, "--check")


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
