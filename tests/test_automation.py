"""The workflow, the hook, the issue form and the Dockerfile run scripts that are there."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
INSTRUCTIONS = {"FROM", "RUN", "WORKDIR", "COPY", "ENTRYPOINT"}


def parsed(name: str):
    """A YAML file whose values are texts; YAML 1.1 reads the key `on` as true."""
    return yaml.load((ROOT / name).read_text(), yaml.BaseLoader)


def runs(script: str) -> bool:
    return os.access(ROOT / script, os.X_OK)


def test_ci_runs_the_script_on_every_python_and_builds():
    workflow = parsed(".github/workflows/ci.yml")
    assert set(workflow) == {"name", "on", "permissions", "jobs"}
    assert {"push", "pull_request"} == set(workflow["on"])
    jobs, commands = workflow["jobs"], []
    for job in jobs.values():
        assert job["runs-on"] == "ubuntu-latest"
        used = [step["uses"] for step in job["steps"] if "uses" in step]
        assert all(re.fullmatch(r"actions/[a-z-]+@v\d+", each) for each in used)
        names = [each.partition("@")[0] for each in used]
        assert names[:2] == ["actions/checkout", "actions/setup-python"]
        assert all(len({"uses", "run"} & set(step)) == 1 for step in job["steps"])
        commands += [step["run"] for step in job["steps"] if "run" in step]
    assert commands == [".ci/run", "scripts/build.sh"]
    assert all(map(runs, commands))
    project = (ROOT / "pyproject.toml").read_text()
    (oldest,) = re.findall(r'requires-python = ">=(.*)"', project)
    versions = jobs["test"]["strategy"]["matrix"]["python"]
    assert versions[0] == oldest
    assert [int(version.removeprefix("3.")) for version in versions] == [11, 12, 13]
    assert jobs["test"]["steps"][1]["with"]["python-version"] == "${{ matrix.python }}"
    build = (ROOT / "scripts/build.sh").read_text()
    assert "-m hatchling build" in build


def test_the_hook_is_what_the_tests_begin_with():
    (repo,) = parsed(".pre-commit-config.yaml")["repos"]
    (hook,) = repo["hooks"]
    assert (repo["repo"], hook["language"], hook["pass_filenames"]) == ("local", "script", "false")
    assert runs(hook["entry"])
    called = re.findall(r"^(?:exec )?(\S*/\S*)", (ROOT / "scripts/test.sh").read_text(), re.M)
    whole = called[called.index(hook["entry"]) :]
    assert whole == [hook["entry"], ".venv/bin/pytest"]
    tools = re.findall(r"^\.venv/bin/(.*)", (ROOT / hook["entry"]).read_text(), re.M)
    assert tools == ["ruff format --check .", "ruff check .", "mypy"]
    assert "\nscripts/test.sh\n" in (ROOT / ".ci/run").read_text()


def test_a_bug_comes_with_what_the_doctor_says():
    form = parsed(".github/ISSUE_TEMPLATE/bug.yml")
    assert {"name", "description", "body"} <= set(form)
    fields = form["body"]
    assert {field["type"] for field in fields} <= {"textarea", "input", "dropdown", "markdown"}
    assert len({field["id"] for field in fields}) == len(fields)
    assert all(field["attributes"]["label"] for field in fields)
    (doctor,) = (f for f in fields if "razorctl doctor --json" in f["attributes"]["label"])
    assert doctor["validations"]["required"] == "true"


def test_the_dockerfile_copies_all_that_setup_installs(tmp_path):
    text = (ROOT / "scripts/Dockerfile").read_text()
    lines = [line.split(" ", 1) for line in text.splitlines() if line and line[0] != "#"]
    assert {name for name, _ in lines} == INSTRUCTIONS
    assert lines[0] == ["FROM", "python:3.12-slim"]
    assert lines[-1] == ["ENTRYPOINT", '["/opt/razorctl/.venv/bin/razorctl"]']
    assert ["RUN", "scripts/setup.sh"] in lines
    assert not re.search(r"https?:|\w\.(com|io|org)\b|token|secret|password|index-url", text, re.I)
    for sources, _, to in (rest.rpartition(" ") for name, rest in lines if name == "COPY"):
        for source in sources.split():
            target = tmp_path / to / source if to.endswith("/") else tmp_path / to
            target.parent.mkdir(parents=True, exist_ok=True)
            copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
            copy(ROOT / source, target)
    assert os.access(tmp_path / "scripts/setup.sh", os.X_OK)
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel"]
    subprocess.run(build, cwd=tmp_path, check=True, capture_output=True)
