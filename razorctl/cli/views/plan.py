"""The output of `plan`: the ways to run a job, the chosen one, and the progress of planning."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from razorctl.cli.views import common as views
from razorctl.cli.views.common import packing_summary, predicted_duration, run_length
from razorctl.config.job import SLOW_COMPILED, Job
from razorctl.config.recipe import Recipe
from razorctl.models.boxes import DRAWN
from razorctl.planning.candidates import KEPT_BY_GRAPHS
from razorctl.units import duration, percent, size

COLUMNS = ("model", "stored", "other", "needs", "room", "step", "run")
SPARE = ("other", "model", "stored", "room", "run")  # left out on a narrow terminal, in this order
LABEL = 14  # characters of a label before it is folded
MUCH = 1.2  # times the card's seconds: a host that takes longer gets a sentence
HARDLY_MORE = 1.1  # times the bytes of an approximate choice: checkpointing in less gets a sentence

if TYPE_CHECKING:
    from razorctl.planning.plan import Plan


@contextmanager
def planning(card: str, budget: int, source: str) -> Iterator[Callable[[str], None]]:
    """Shows a text while the block plans; yields the function that names the traced way."""
    text = f"planning for {card}, {size(budget)} {source}"
    with views.status(text) as update:
        yield lambda way: update(f"{text}: tracing {way}")


def say_choice(planned: "Plan") -> None:
    """Prints the way of a plan that `finetune` takes."""
    card = f"{planned.gpu.name}, {size(planned.budget)}"
    views.say(f"planned for {card}: {planned.chosen.label}, {planned.reason}.")


def show(plan: dict[str, Any], explain: bool) -> None:
    """Prints the document of a plan: the ways, the choice and its command.

    explain: also print the steps of the choice.
    """
    show_ways(plan)
    if explain:
        for i, line in enumerate(plan["explanation"], start=1):
            views.out.print(f"{i}. {line}", highlight=False)
        views.out.print()
    if plan["packing"] is not None:
        tokens = packing_summary(plan["packing"], bool(plan["job"]["packing"]))
        share = percent(plan["chosen"]["predicted"]["average_share"])
        views.out.print(
            f"{tokens}. The table has the longest step; an average one takes {share} of its time.",
            highlight=False,
        )
    choice = f"> {plan['chosen']['label']}: {plan['reason']}."
    words = choice, *_closeness(plan), *_others(plan), *_checkpoint(plan), *_compiled(plan)
    words += *_graphs(plan), *_host(plan)
    views.out.print(" ".join(words), highlight=False)
    views.line(plan["command"])


def show_ways(document: Mapping[str, Any]) -> None:
    """Prints a row for each way to run a job.

    document: of a plan, or `NoFitError.document`.
    """
    job, gpu, budget = document["job"], document["gpu"], document["budget_bytes"]
    cards = f" on each of {job['processes']}, {job['strategy']}" if job["processes"] > 1 else ""
    title = (
        f"{views.title(job['model'], job['dataset'])}: "
        f"batch {job['batch_size']}, {job['precision']}, {job['optimizer']}, "
        f"{run_length(job, document.get('steps_per_epoch'))}\n"
        f"{gpu['name']}, {size(budget)}{cards}"
    )
    chosen, entries = document.get("chosen"), document["candidates"]
    shown: set[object] = set()
    for state in dict.fromkeys(entry["state"] for entry in entries):
        ways = [entry for entry in entries if entry["state"] == state]
        if any(entry["fits"] for entry in ways) or not state or chosen is None:
            title = "\n".join(filter(None, (title, state and f"With {state}:")))
            table = _table(title, ways, chosen, budget, job["steps"])
            shown |= {column.header for column in table.columns}
            views.out.print(table)
            title = ""
    reserve = size((chosen or entries[0])["predicted"]["reserve_bytes"])
    borrowed = gpu["achieved"]["borrowed"]
    remarks = f", times with the measured efficiency of the {borrowed}" if borrowed else ""
    if job["processes"] > 1:
        remarks += f"; each of {job['processes']} GPUs needs this memory"
        remarks += ", and communication adds to the times"
    if job.get("task") == "detection":
        remarks += f"; each image has {DRAWN} objects"
    legend = {
        "model": "weights, gradients and optimizer state",
        "stored": "activations for backward",
        "other": f"inputs, temporaries, and {reserve} for context and fragmentation",
        "room": "memory left",
    }
    views.out.print(
        f"All figures are predicted{remarks}. Only an H100 and an H200 have run razorctl's "
        "kernels. ≈: approximate gradient.",
        *(f"{name}: {meaning}." for name, meaning in legend.items() if name in shown),
        highlight=False,
        style="dim",
    )


def _table(
    title: str,
    ways: Sequence[Mapping[str, Any]],
    chosen: Mapping[str, Any] | None,
    budget: int,
    steps: int | None,
) -> Table:
    """The table of the ways with one state of weights and optimizer, as wide as the terminal."""
    for left_out in range(len(SPARE) + 1):
        shown = [name for name in COLUMNS if name not in SPARE[:left_out]]
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("  GiB", max_width=LABEL)
        for name in shown:
            table.add_column(name, justify="right", no_wrap=True)
        for entry in ways:
            figures = _figures(entry, budget, steps)
            mark, sign = "> " if entry == chosen else "  ", "" if entry["exact"] else " ≈"
            table.add_row(
                mark + _label(entry) + sign,
                *(figures[name] for name in shown),
                style="bold green" if entry == chosen else None if entry["fits"] else "dim",
            )
        if views.table_width(table) <= views.out.width:
            break
    table.columns[0].max_width = None
    table.title, table.title_justify = title, "left"  # it is wrapped, and takes no width
    return table


def _figures(entry: Mapping[str, Any], budget: int, steps: int | None) -> dict[str, str]:
    """The cells of a way, by column."""
    predicted, (fixed, needs) = entry["predicted"], _sizes(entry)
    stored = predicted["peak_bytes"] - fixed - predicted["transient_bytes"]
    figures = (fixed, stored, needs - fixed - stored, needs, budget - needs)
    times = (
        _narrow(predicted_duration(predicted)),
        _narrow(predicted_duration(predicted, steps)) if steps else "-",
    )
    cells = *(f"{figure / 2**30:.2f}" for figure in figures), *times
    return dict(zip(COLUMNS, cells, strict=True))


def _label(entry: Mapping[str, Any]) -> str:
    """The label of a way, without its state."""
    label: str = entry["label"]
    return label.removesuffix(f", {entry['state']}")


def _narrow(times: str) -> str:
    """A range of times on two lines, so that its column is narrow."""
    return times.replace(" to ", "\nto ")


def _closeness(plan: dict[str, Any]) -> Iterator[str]:
    """What the measured cosine of an approximate choice means."""
    chosen = plan["chosen"]
    if not chosen["exact"] and chosen["cosine"] is not None:
        error = percent(math.sqrt(max(0.0, 1 - chosen["cosine"] ** 2)))
        yield (
            "A cosine of 1 is exact; with this one the gradient points the same way, with an "
            f"orthogonal error of up to {error} of its length."
        )


def _checkpoint(plan: dict[str, Any]) -> Iterator[str]:
    """A sentence on checkpointing where state decides, so that an approximation saves little."""
    chosen = plan["chosen"]
    for entry in plan["candidates"]:
        fixed, needs = _sizes(entry)
        alike = entry["method"] == "checkpoint" and entry["state"] == chosen["state"]
        little = needs <= min(2 * fixed, HARDLY_MORE * _sizes(chosen)[1])
        if alike and entry["fits"] and little and not chosen["exact"]:
            yield (
                f"{entry['label']} is exact and needs {size(needs)}; {percent(fixed / needs)} of "
                "that are weights, gradients and optimizer state, which razor does not shrink."
            )
            return


def _sizes(entry: Mapping[str, Any]) -> tuple[int, int]:
    """Bytes of weights, gradients and optimizer state, and all bytes that a way needs."""
    of = entry["predicted"]
    fixed = of["weights_bytes"] + of["gradients_bytes"] + of["optimizer_bytes"]
    return fixed, of["peak_bytes"] + of["reserve_bytes"]


def _others(plan: dict[str, Any]) -> list[str]:
    """A sentence on the choice of each other preference."""
    chosen, words = plan["chosen"], []
    if plan["others"] and all(entry == chosen for entry in plan["others"].values()):
        return ["Every --prefer chooses it."]
    for prefer, entry in plan["others"].items():
        what = "the same"
        if entry is None:
            what = "nothing fits"
        elif entry != chosen:
            gradient = "exact" if entry["exact"] else "approximate"
            what = f"{entry['label']}, {gradient}, {_faster(entry, chosen)}"
        words.append(f"--prefer {prefer}: {what}.")
    return words


def _compiled(plan: dict[str, Any]) -> Iterator[str]:
    """A sentence on compiled full fine-tuning where it fits and is faster than the choice.

    Another on a choice that is slower compiled.
    """
    chosen = plan["chosen"]
    if plan["job"]["compile"] and Recipe(**chosen["recipe"]).has_byte_budget:
        yield SLOW_COMPILED.format(method=chosen["method"])
    for entry in plan["candidates"]:
        faster = entry["predicted"]["step_seconds"] < chosen["predicted"]["step_seconds"]
        if entry["compiled"] and entry["fits"] and faster:
            yield f"--method full --compile: exact, {_faster(entry, chosen)} after it has compiled."


def _graphs(plan: dict[str, Any]) -> Iterator[str]:
    """A sentence if there may be too little memory for the CUDA graphs of the choice."""
    job, predicted = Job(**plan["job"]), plan["chosen"]["predicted"]
    usual = job.eager_reason(plan["chosen"]["joint_budget"]) is None
    captured = usual if job.cuda_graphs is None else job.captured
    peak, kept = predicted["peak_bytes"], KEPT_BY_GRAPHS * predicted["peak_bytes"]
    if captured and peak + predicted["reserve_bytes"] + kept > plan["budget_bytes"]:
        then = "the run ends" if job.strict else "steps run without them"
        yield f"CUDA graphs may reserve {size(kept)} more; if less is free, {then}."


def _host(plan: dict[str, Any]) -> Iterator[str]:
    """What to know of the update; CUDA graphs if the host takes MUCH longer than the card."""
    predicted, job = plan["chosen"]["predicted"], plan["job"]
    if job["optimizer_in_backward"]:
        yield "The gradient is not clipped, since it is never in memory as a whole."
    if predicted["host_bytes"]:
        yield f"The optimizer state takes {size(predicted['host_bytes'])} of host memory."
    host, card = predicted["host_seconds"], predicted["card_seconds"]
    draws = plan["chosen"]["recipe"]["joint_budget"] < 1
    refused = job["processes"] > 1 or job["optimizer_in_backward"] or draws
    refused = refused or job["optimizer_state"] == "host" or job.get("task") == "detection"
    if host > MUCH * card and not (refused or job["cuda_graphs"] or job["compile"]):
        yield (
            f"Python takes {duration(host)} to launch a step, and the GPU {duration(card)} to run "
            "it. --cuda-graphs launches all kernels at once, for up to "
            f"{size(KEPT_BY_GRAPHS * predicted['peak_bytes'])} more reserved memory."
        )


def _faster(entry: dict[str, Any], other: dict[str, Any]) -> str:
    """The speed of one way compared with another."""
    times = other["predicted"]["step_seconds"] / entry["predicted"]["step_seconds"]
    return f"about {times:.2f}x faster" if times >= 1 else f"about {1 / times:.2f}x slower"
