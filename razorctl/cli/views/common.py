"""What a terminal shows: tables on stdout, messages on stderr."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from razorctl.methods import METHODS

out = Console()
err = Console(stderr=True)
EVERY = 30.0  # seconds that nothing is said at most, where there is no live display


def size(count: int) -> str:
    """Bytes as GiB, or MiB and KiB below one of them."""
    for unit, power in (("GiB", 30), ("MiB", 20)):
        if count >= 1 << power:
            return f"{count / (1 << power):,.2f} {unit}"
    return f"{count / 1024:,.1f} KiB"


def duration(seconds: float) -> str:
    """Seconds as ms, s, min, h or days."""
    if seconds < 1:
        return f"{seconds * 1000:.{1 if seconds < 0.1 else 0}f} ms"
    for unit, length, most in (("s", 1, 120), ("min", 60, 5400), ("h", 3600, 172_800)):
        if seconds < most:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds / 86_400:.1f} days"


def against(part: int, whole: int) -> str:
    """How much less or more than `whole` `part` is, in percent."""
    if part == whole:
        return "all of it"
    share = abs(1 - part / whole)
    if share < 0.0005:
        return "about all of it"
    # No 0 % where there is a difference, and no 100 % where something is left.
    percent = f"{share:.1%}" if share < 0.01 or 0.99 < share < 1 else f"{share:.0%}"
    return f"{percent} {'less' if part < whole else 'more'}"


def summary(recipe: dict[str, Any]) -> str:
    """Method, ratio and joint budget, as far as they say something."""
    text = str(recipe["method"])
    if METHODS[text].has_ratio:
        text += f", ratio {recipe['ratio']:g}"
    if recipe["joint_budget"] < 1:
        what = recipe["joint"] if recipe["joint"] == "branches" else "joint budget"
        text += f", {what} {recipe['joint_budget']:g}"
    return text


def error(message: str) -> None:
    """One sentence on stderr, on one line however narrow the terminal."""
    err.print("[bold red]error:[/]", escape(message), highlight=False, soft_wrap=True)


def print_json(document: Any) -> None:
    # Plain print: rich would wrap and colour what a program is to read.
    print(json.dumps(document, indent=2))


def say(text: str) -> None:
    """A line on stderr, however narrow the terminal."""
    err.print(text, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def planning(card: str, budget: int, source: str) -> Iterator[Callable[[str], None]]:
    """Says what is planned while inside it; what it yields is told what is traced."""
    words = f"planning for {card}, {size(budget)} {source}"
    with waiting(words) as change:
        yield lambda way: change(f"{words}: tracing {way}")


def width(table: Table) -> int:
    """Columns of a terminal that a table takes where no line of it is broken."""
    return Measurement.get(out, out.options.update(width=1000), table).maximum


def note(sentence: str) -> None:
    """What a user may not have meant, on stderr."""
    err.print("[bold yellow]note:[/]", escape(sentence), highlight=False, soft_wrap=True)


class Pulse:
    """Says on stderr what is being done, inside it: again whenever nothing was said for EVERY s."""

    def __init__(self, text: str = "") -> None:
        self.text = text
        self._start = self._spoke = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    @property
    def silence(self) -> float:
        """Seconds since the last word."""
        return time.monotonic() - self._spoke

    def keep(self, text: str) -> None:
        """What is being done now, not to be said yet."""
        self.text = text

    def say(self, text: str) -> None:
        """Says it now."""
        self._spoke = time.monotonic()
        self.keep(text)
        say(text)

    def _beat(self) -> None:
        while not self._over.wait(max(0.0, EVERY - self.silence)):
            if self.silence >= EVERY:
                self._spoke = time.monotonic()
                say(f"{self.text} ({duration(self._spoke - self._start)} so far)")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


@contextmanager
def waiting(text: str) -> Iterator[Callable[[str], None]]:
    """Says inside it what is being done: on a terminal at once, elsewhere where it takes long.

    Yields what changes the text.
    """
    if err.is_interactive:
        with err.status(f"{text} ...") as status:
            yield lambda text: status.update(f"{text} ...")
    else:
        with Pulse(text) as pulse:
            yield pulse.keep


def show_result(result: dict[str, Any]) -> None:
    """The closing table of `finetune`."""
    title = f"{result['model']} on {result['dataset']}: {summary(result['recipe'])}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_header=False)
    table.add_column(style="bold")
    table.add_column()
    table.add_column(style="dim")
    saved, full = result["saved_bytes"], result["full_saved_bytes"]
    predicted = result["predicted"] or {}
    table.add_row("saved for backward", size(saved), against(saved, full))
    table.add_row("full fine-tuning saves", size(full))
    if result["peak_bytes"] is not None:
        table.add_row("peak of a step", size(result["peak_bytes"]), "allocated")
    if predicted:
        table.add_row("peak as planned", size(predicted["peak_bytes"]), "predicted")
    table.add_row("step", duration(result["step_seconds"]), f"median of {result['steps']:,}")
    if predicted:
        table.add_row("step as planned", duration(predicted["step_seconds"]), "predicted")
    table.add_row("epoch", duration(result["epoch_seconds"]), f"on {result['device']}")
    table.add_row("test accuracy", f"{result['accuracy']:.4f}", f"loss {result['loss']:.4f}")
    out.print(table)
    out.print(f"weights: {result['weights']}", soft_wrap=True, highlight=False, markup=False)


def show_plan(plan: dict[str, Any], explain: bool) -> None:
    """The table of `plan`, from its JSON document, with the chosen way marked, and the command."""
    show_ways(plan)
    if explain:
        for i, line in enumerate(plan["explanation"], start=1):
            out.print(f"{i}. {line}", highlight=False)
        out.print()
    taken = f"{plan['chosen']['label']}: {plan['reason']}."
    out.print(" ".join((">", taken, *_others(plan))), highlight=False)
    out.print(plan["command"], soft_wrap=True, highlight=False, markup=False)


def show_ways(document: Mapping[str, Any]) -> None:
    """A row for each way to run a job, from the JSON document of a plan or of a refusal."""
    job, gpu, budget = document["job"], document["gpu"], document["budget_bytes"]
    title = (
        f"{job['model']} on {job['dataset']}: batch {job['batch_size']}, {job['precision']}, "
        f"{job['optimizer']}, {job['steps']:,} steps\n{gpu['name']}, {size(budget)}"
    )
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)
    )
    table.add_column("  GiB")
    for name in ("model", "saved", "other", "needs", "room", "step", "run"):
        table.add_column(name, justify="right", no_wrap=True)
    chosen = document.get("chosen")
    for entry in document["candidates"]:
        predicted = entry["predicted"]
        fixed = sum(predicted[f"{part}_bytes"] for part in ("weights", "gradients", "optimizer"))
        needs = predicted["peak_bytes"] + predicted["reserve_bytes"]
        saved = predicted["peak_bytes"] - fixed - predicted["transient_bytes"]
        figures = (fixed, saved, needs - fixed - saved, needs, budget - needs)
        table.add_row(
            ("> " if entry == chosen else "  ") + entry["label"] + ("" if entry["exact"] else " ≈"),
            *(f"{figure / 2**30:.2f}" for figure in figures),
            *(duration(seconds) for seconds in (predicted["step_seconds"], entry["run_seconds"])),
            style="bold green" if entry == chosen else None if entry["fits"] else "dim",
        )
    out.print(table)
    reserve = size(document["candidates"][0]["predicted"]["reserve_bytes"])
    borrowed = gpu["achieved"]["borrowed"]
    times = f", times at the shares of its peak rates that the {borrowed} reaches" * bool(borrowed)
    out.print(
        f"All predicted{times}. ≈: approximate gradient. model: weights, gradients and optimizer "
        f"state; saved: for backward; other: inputs, temporaries, and some {reserve} for context "
        "and fragmentation; room: what is left of the memory.",
        highlight=False,
        style="dim",
    )


def _others(plan: dict[str, Any]) -> list[str]:
    """What the other preferences would have chosen, and what that gains."""
    chosen, words = plan["chosen"], []
    if plan["others"] and all(entry == chosen for entry in plan["others"].values()):
        return ["So it is with every preference."]
    for prefer, entry in plan["others"].items():
        what = "the same"
        if entry is None:
            what = "nothing fits"
        elif entry != chosen:
            gradient = "exact" if entry["exact"] else "approximate"
            what = f"{entry['label']}, {gradient}, {_faster(entry, chosen)}"
        words.append(f"--prefer {prefer}: {what}.")
    return words


def _faster(entry: dict[str, Any], other: dict[str, Any]) -> str:
    """How much faster or slower one way is than another."""
    times = other["run_seconds"] / entry["run_seconds"]
    return f"{times:.2f}x faster" if times >= 1 else f"{1 / times:.2f}x slower"


def show_names(groups: dict[str, dict[str, str]], brief: bool) -> None:
    """The table of `list`: group -> name -> summary; if `brief`, a line each, without recipes."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    if brief:
        table.add_column(style="dim", no_wrap=True)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for group, names in groups.items():
        if brief and group == "recipes":
            continue
        for i, (name, summary) in enumerate(names.items()):
            text = Text(summary, no_wrap=brief, overflow="ellipsis" if brief else None)
            table.add_row(*["" if i else group][:brief], name, text)
    out.print(table)
    if brief:
        more = "In full: razorctl list models, datasets, methods, gpus or recipes."
        out.print(more, style="dim", highlight=False)
