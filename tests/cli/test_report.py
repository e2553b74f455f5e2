"""The report of `compare --html`: one self-contained file, of runs that are not trained."""

import errno
import json
import os
import re
from base64 import b64decode
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib as mpl
import pytest
import tomli_w

from razorctl.cli.views import classes, plots, report
from razorctl.training.comparing import peaks
from razorctl.training.comparing.curves import Curve
from tests.comparing import compare, write
from tests.training.runs import edit_result

TEXT = "{http://www.w3.org/2000/svg}text"
NASTY = """<b>&"it's"$x$[bold]</b>"""
VOID = {"meta", "br", "img"}


class Page(HTMLParser):
    """The page as elements: their texts by tag, and all attributes; refuses unbalanced tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.attributes: list[tuple[str, str, str]] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)
        self.texts.setdefault(tag, []).append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        for tag in set(self.open):
            self.texts[tag][-1] += data

    def rows(self, name: str) -> list[list[str]]:
        """The cells of each row of three that begins with a name."""
        cells = self.texts["td"]
        return [cells[at : at + 3] for at, text in enumerate(cells) if text == name]

    def values(self, tag: str, name: str) -> list[str]:
        return [value for t, n, value in self.attributes if (t, n) == (tag, name)]


def drawn(images: list[str]) -> list[set[str]]:
    """The texts of each plot, by the sources of <img> elements."""
    svgs = [b64decode(each.removeprefix("data:image/svg+xml;base64,")) for each in images]
    return [{text.text or "" for text in ElementTree.fromstring(svg).iter(TEXT)} for svg in svgs]


def page(*words: str, name: str = "report.html") -> Page:
    result = compare(*words, "--html", name)
    assert result.exit_code == 0, result.stderr
    assert result.stderr.endswith(f"report: {name}\n")
    return Page(Path(name).read_text("utf-8"))


def runs() -> list[str]:
    """The directories of two seeds of full and one of razor."""
    known = [
        write(f"f{seed}", seed=seed, accuracies=(None, 0.5, 0.9 + seed / 50)) for seed in (0, 1)
    ]
    razor = write("r", "razor", saved=100, step=0.5, accuracies=(None, 0.5, 0.908))
    return [*map(str, known), str(razor)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> str:
    """A report of `runs` with plots."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("whole"))
        patch.setattr(peaks, "measured", lambda _: True)
        page(*runs())
        return Path("report.html").read_text("utf-8")


@pytest.fixture(autouse=True)
def untraced(monkeypatch):
    """Peaks are not traced, which takes a second for each row."""
    monkeypatch.setattr(peaks, "measured", lambda _: True)


@pytest.fixture
def no_plots(monkeypatch):
    """Leaves out the plots, which take long to draw."""
    monkeypatch.setattr(report.plots, "curves", lambda *_: " ")
    monkeypatch.setattr(report, "_memory_time", lambda *_: " ")


def grid(**job: str) -> Path:
    """A directory of `compare` whose run of razor failed."""
    out = Path("grid")
    write("grid/full-0", **job)
    job = {"model": "vit-micro", "dataset": "digits", **job}
    runs = {"methods": ["full", "razor"], "seeds": [0]}
    tables = {"job": job, "runs": runs, "recipe": {"ratio": 0.9}, "environment": {}}
    (out / "comparison.toml").write_text(tomli_w.dumps(tables))
    (out / "razor-0").mkdir()
    failure = {"error": f"{NASTY} is too large; <script>alert(1)</script>.", "exit_code": 4}
    (out / "razor-0/failure.json").write_text(json.dumps(failure))
    return out


def test_all_is_there(whole):
    found = Page(whole)
    assert found.texts["h1"] == ["vit-micro on digits"]
    advice = "Take razor 0.9: razor 0.9 is 0.2 points below full (1 seed); razor 0.9 needs 90 % "
    assert any(text.startswith(advice) for text in found.texts["p"])
    assert found.texts["th"][:4] == ["", "method", "stored, tracedMiB", "of full%"]
    cells = found.texts["td"]
    assert (cells[:2], cells[9:11]) == (["*", "full"], ["*", "razor 0.9"])
    assert "91.00 ± 1.41" in cells[:9]
    assert found.values("img", "alt") == [
        "stored, traced (MiB) by step (s)",
        "training loss over steps, training loss over seconds, "
        "accuracy (%) over steps, accuracy (%) over seconds",
    ]
    points, curves = drawn(found.values("img", "src"))
    assert {"full: 91.00 ± 1.41 %", "razor 0.9: 90.80 %", "step (s)"} <= points
    assert {"full", "razor 0.9", "training loss", "accuracy (%)", "steps", "seconds"} <= curves
    assert cells[cells.index("torch") + 1] == "2.99"
    assert "None" not in cells
    assert found.texts["caption"][1:] == ["Environment", "Settings of all runs"]
    assert "2026-01-01 10:00 UTC to 2026-01-02 10:00 UTC" in cells
    assert (cells[cells.index("compile") + 1], cells[cells.index("accumulate") + 1]) == ("no", "1")
    assert "".join(found.texts["pre"]).split("\n") == [
        "razorctl compare f0 f1 r --html report.htmlrazorctl --config f0/config.toml finetune",
        "razorctl --config f1/config.toml finetune",
        "razorctl --config r/config.toml finetune",
    ]


def test_nothing_is_loaded(whole):
    found = Page(whole)
    assert not re.search("https?:", whole)
    assert "@import" not in whole
    assert "url(" not in whole
    loading = [value for _, name, value in found.attributes if name in ("src", "href", "data")]
    assert all(value.startswith("data:") for value in loading)
    assert not {"script", "link", "iframe", "object"} & found.texts.keys()
    (policy,) = found.values("meta", "content")[1:]
    assert policy.startswith("default-src 'none'")


def test_the_same_comparison_gives_the_same_bytes(whole):
    page(*runs())
    assert Path("report.html").read_text("utf-8") == whole


def test_what_users_write_is_escaped(no_plots):
    found = page(str(grid(dataset=NASTY)))
    assert found.texts["h1"] == [f"vit-micro on {NASTY}"]
    assert f"{NASTY} is too large; <script>alert(1)</script>." in "".join(found.texts["p"])
    assert not {"b", "i", "script"} & found.texts.keys()
    assert found.texts["caption"][0].startswith(f"vit-micro on {NASTY}, batch 16")
    assert f"razor: {NASTY} is too large; <script>alert(1)</script>." in found.texts["p"]
    assert "razorctl --config grid/comparison.toml compare vit-micro" in "".join(found.texts["pre"])


def test_plots_have_the_figures_of_the_table_in_its_units(monkeypatch):
    drawn: list[tuple[Any, ...]] = []
    for name in ("memory_time", "curves"):
        monkeypatch.setattr(plots, name, lambda *given: drawn.append(given) or "")
    worse = write("w", "backrazor", saved=1 << 21, step=2.0, accuracies=(None, 0.25))
    page(str(write("a", saved=1 << 20)), str(worse))
    (points, *names), (panels,) = drawn
    assert names == ["step (s)", "stored, traced (MiB)"]
    assert [*map(tuple, points)] == [
        ("full: 90.00 %", 1.0, 1.0, True),
        ("backrazor 0.9: 25.00 %", 2.0, 2.0, False),
    ]
    assert [(panel.name, panel.over) for panel in panels] == [
        *(("training loss", "steps"), ("training loss", "seconds")),
        *(("accuracy (%)", "steps"), ("accuracy (%)", "seconds")),
    ]
    ((label, (curve,)), _), (_, (_, (other,))) = panels[0].rows, panels[2].rows
    assert (label, [*curve.values]) == ("full", [2, 1, pytest.approx(2 / 3)])
    assert (other.steps, other.seconds, other.values) == ([2], [4], [25])


def test_every_row_has_a_mark_of_its_own_and_its_label_is_no_formula_and_no_element():
    labels = [NASTY, *(f"row {n}" for n in range(39))]
    points = [plots.Point(label, float(n), 1.0, n % 2 == 0) for n, label in enumerate(labels)]
    found = Page(plots.memory_time(points, "step", "saved"))
    (texts,) = drawn(found.values("img", "src"))
    assert {*labels} <= texts
    curve = Curve([1.0], [1.0], [1.0])
    panel = plots.Panel(NASTY, "steps", [(label, [curve]) for label in labels])
    with plots._style():
        marks = {tuple(sorted(each.items())) for each in mpl.rcParams["axes.prop_cycle"]}
    assert len(marks) == len(labels)
    found = Page(plots.curves([panel]))
    (texts,) = drawn(found.values("img", "src"))
    assert {*labels} <= texts


def test_less_perplexity_is_better():
    job = {"task": "causal-lm", "figure": "perplexity"}
    words = [str(write("a", accuracies=(30.0, 20.0), **job))]
    words.append(str(write("b", "razor", accuracies=(30.0, 19.0), step=0.5, **job)))
    found = page(*words)
    assert any("5 % less perplexity than full" in text for text in found.texts["p"])
    assert "perplexity over steps" in found.values("img", "alt")[1]
    assert "perplexity" in found.texts["th"]


def test_a_target_has_the_unit_of_its_column():
    write("a", accuracies=(0.2, 0.8), task="regression", metric="pearson", figure="pearson")
    assert "until Pearson r stays at 79.20 or more." in " ".join(compare("a").stdout.split())


def test_the_classes_of_each_row_and_what_their_labels_were_taken_for(no_plots):
    """Figures are means over the seeds, and matrices their sums."""
    names = []
    for seed, right in ((0, 8), (1, 4)):
        f1 = [right / 10, 0.5]
        by_class = {"labels": [10, 2], "precision": f1, "recall": f1, "f1": f1}
        by_class["confusion"] = [[right, 10 - right], [1, 1]]
        more = {"classes": ["<b>", "dog"], "by_class": by_class}
        edit_result(write(f"f{seed}", seed=seed), lambda result, more=more: result.update(more))
        names.append(f"f{seed}")
    page(*names)
    found = Page(Path("report.html").read_text("utf-8"))
    assert found.texts["caption"][1:3] == [
        "F1 of classes in %, by the best weights",
        "full: confusion matrix",
    ]
    assert [*found.rows("<b>"), *found.rows("dog")] == [
        *(["<b>", "10", "60.00"], ["<b>", "12", "8"], ["dog", "2", "50.00"], ["dog", "2", "2"]),
    ]
    without = page(*names, str(write("r", "razor")), name="without.html")  # one has no classes
    assert not any("F1" in text for text in without.texts["caption"])


@pytest.mark.parametrize(("width", "heads"), [(80, ["a [long] name", "b"]), (40, ["1", "2"])])
def test_a_matrix_that_is_wider_than_the_terminal_has_numbers(width, heads, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    names = ["a [long] name", "b"]
    half = [0.5, 0.5]
    by_class = {"labels": [3, 4], "precision": half, "recall": half, "f1": half}
    classes.show(names, {**by_class, "confusion": [[1, 2], [1000, 3000]]})
    lines = [re.split(r"\s{2,}", line.strip()) for line in capsys.readouterr().out.splitlines()]
    rows = names if width == 80 else ["1: a [long] name", "2: b"]
    assert ["label / predicted", *heads] in lines
    assert [rows[0], "1", "2"] in lines
    assert [rows[1], "1,000", "3,000"] in lines


def test_a_comparison_without_a_finished_run_has_no_plots():
    out = grid()
    (out / "full-0/result.json").unlink()
    result = compare(str(out), "--html", "report.html")
    assert result.exit_code == 1
    found = Page(Path("report.html").read_text("utf-8"))
    assert any(text.startswith("No choice yet") for text in found.texts["p"])
    assert not found.values("img", "src")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES], ids=errno.errorcode.get)
@pytest.mark.parametrize("method", ["write_bytes", "write_text"], ids=["before", "at the end"])
def test_a_disk_that_does_not_take_it(method, code, monkeypatch, no_plots):
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    words = runs()
    monkeypatch.setattr(Path, method, refuse)
    result = compare(*words, "--json", "--html", "r.html")
    assert result.exit_code == 2
    assert f"error: cannot write r.html ({os.strerror(code)})" in result.stderr
    assert result.stderr.count("\n") == 1
    if method == "write_bytes":
        assert result.stdout == ""
    else:  # what was compared is shown all the same
        assert len(json.loads(result.stdout)["rows"]) == 2
        assert "make room, then run `razorctl compare f0 f1 r --html r.html`" in result.stderr
    assert not list(Path().glob("r.html*"))
