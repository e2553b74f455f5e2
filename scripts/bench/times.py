"""The tables of what was timed: whole steps, the same at every ratio, one linear layer."""

from collections.abc import Iterator

from pages import MIB, RESULTS, Cells, Row, label, load, ordered, source, table

Gain = tuple[float, float]  # how many times as fast the forward pass is, and both passes


def whole_steps() -> Iterator[str]:
    for path in sorted(RESULTS.glob("step_*.json")):
        document = load(path.stem)
        for precision in document["precisions"]:
            rows = {r["case"]: r for r in taken(document) if r["precision"] == precision}
            if not rows:
                continue
            compiled = any(row.get("step_time_vs_full_compiled") for row in rows.values())
            head = ["method", "kept for backward", "peak of a step", "step time vs `full`"]
            yield (
                f"{workload(document, precision)}, ratio {document['ratio']}: times are medians of "
                f"at most {document['turns']} turns.\nIn each turn the cases run one after "
                f"another. {peaks(document)}.\n\n"
                + source(path.stem, document)
                + table(
                    [*head, "vs `full`, compiled"] if compiled else head,
                    [whole_step(rows[case], compiled) for case in ordered(rows)],
                )
            )


def taken(document: Row) -> list[Row]:
    """The rows that there was time for."""
    return [row for row in document["rows"] if "in the seconds given" not in (row["error"] or "")]


def workload(document: Row, precision: str) -> str:
    model, pixels, batch = (document[key] for key in ("model", "image_size", "batch_size"))
    return f"Whole steps of {model}, {pixels} px, batch {batch}, {precision}"


def peaks(document: Row) -> str:
    if "CPU" not in document["device"]:
        return "Peaks are measured"
    compiled = any(", compiled" in row["case"] for row in document["rows"])
    return "Peaks are traced" + (", but those of compiled cases are measured" if compiled else "")


def whole_step(row: Row, compiled: bool) -> Cells:
    keys = ["step_time_vs_full"]
    if compiled:
        keys.append("step_time_vs_full_compiled")
    if row["error"]:  # a case that failed its check has no time
        return [label(row["case"]), row["error"], "", *("" for _ in keys)]
    saved, peak = (f"{row[name] / MIB:.0f} MiB" for name in ("saved_bytes", "peak_bytes"))
    times = ("" if row[key] is None else f"{row[key]:.2f}" for key in keys)
    return label(row["case"]), saved, peak, *times


def frontiers() -> Iterator[str]:
    for path in sorted(RESULTS.glob("frontier_*.json")):
        document = load(path.stem)
        ratios = sorted({row["ratio"] for row in taken(document)} - {None})
        for precision in document["precisions"]:
            rows = [row for row in taken(document) if row["precision"] == precision]
            row_of = {(row["case"].partition(" at ")[0], row["ratio"]): row for row in rows}
            yield (
                f"{workload(document, precision)}: the peak in MiB, and the time\nof a step "
                f"divided by that of `full`. {peaks(document)}. Times are medians of at most "
                f"{document['turns']} turns.\n\n"
                + source(path.stem, document)
                + table(
                    ["method", *(f"ratio {ratio}" for ratio in ratios), "no ratio"],
                    [
                        [label(case), *(point(row_of.get((case, r))) for r in (*ratios, None))]
                        for case in ordered(case for case, _ in row_of)
                    ],
                )
            )


def point(row: Row | None) -> str:
    if row is None or row["error"]:
        return "" if row is None else row["error"]
    return f"{row['peak_bytes'] / MIB:,.0f}, {row['step_time_vs_full']:.2f}"


def linear_layers() -> Iterator[str]:
    for path in sorted(RESULTS.glob("linear_*.json")):
        document = load(path.stem)
        shape = [document[key] for key in ("batch_size", "tokens", "width")]
        for precision in document["precisions"]:
            rows = [row for row in document["rows"] if row["precision"] == precision]
            row_of = {(row["method"], row["ratio"]): row for row in rows}
            methods = list(dict.fromkeys(m for m, _ in row_of if m != "full"))
            gains = {r: gain(row_of, r) for r in document["ratios"]}
            published = {float(r): paper(times) for r, times in document["published_ms"].items()}
            yield (
                f"One linear layer with inputs of shape {shape}, {precision}: the time of its\n"
                "forward pass / of its forward and backward pass, divided by that of `full`; "
                f"medians of {document['turns']} turns.\n{verdict(gains)}\nIn Tab. 3 of Sheared "
                f"Backpropagation it is {span(list(published.values()))} times as fast, on an RTX "
                "4090 at batch 128.\n\n"
                + source(path.stem, document)
                + table(
                    ["ratio", *(f"`{m}`" for m in methods), "columns over elements", "Tab. 3"],
                    [
                        [
                            ratio,
                            *(layer(row_of[method, ratio]) for method in methods),
                            faster(gains[ratio]),
                            faster(published.get(ratio)),
                        ]
                        for ratio in document["ratios"]
                    ],
                )
            )


def packed() -> str:
    """The section on packed conversations."""
    document = load("packing_cpu")
    rows = document["rows"]
    one = rows[0]
    return (
        "Forward and backward passes of 8 conversations of 16 to 512 tokens take turns, padded and "
        "packed, on one\nthread. The "
        f"{one['tokens']:,} tokens of {one['turns']} micro-batches are {one['packed_tokens']:,} if "
        f"packed, {one['padded_tokens']:,} if padded. The gradient's\ncosine is to that of the "
        "padded ones, of which razor's tiles are others.\n\n"
        + source("packing_cpu", document)
        + table(
            ["method", "precision", "tokens a second, times those of padded ones", "gradient"],
            [
                [
                    *(f"`{row['method']}`", row["precision"], f"{row['times_as_fast']:.2f}"),
                    f"{row['cosine']:.6f}",
                ]
                for row in rows
            ],
        )
    )


def gain(row_of: dict[tuple[str, float], Row], ratio: float) -> Gain | None:
    """How many times as fast `prebackrazor`, which keeps columns, is as `backrazor`."""
    elements, columns = row_of["backrazor", ratio], row_of["prebackrazor", ratio]
    if elements["error"] or columns["error"]:
        return None
    forward, both = (elements[key] / columns[key] for key in ("forward_vs_full", "both_vs_full"))
    return forward, both


def paper(times: list[float]) -> Gain:
    return times[0] / times[1], times[2] / times[3]


def span(gains: list[Gain]) -> str:
    """The least and the most of the gains in both passes."""
    both = [gain[1] for gain in gains]
    return f"{min(both):.2f} to {max(both):.2f}"


def verdict(gains: dict[float, Gain | None]) -> str:
    measured = [gain for gain in gains.values() if gain]
    more = sum(gain[1] > 1 for gain in measured)
    return (
        f"Keeping columns (`prebackrazor`) is faster than keeping elements (`backrazor`) at {more} "
        f"of {len(gains)} ratios:\n{span(measured)} times as fast over both passes."
    )


def faster(gain: Gain | None) -> str:
    return " / ".join(f"{times:.2f}" for times in gain) if gain else ""


def layer(row: Row) -> str:
    if row["error"]:
        return "cannot be met" if "cannot be met" in row["error"] else row["error"]
    return f"{row['forward_vs_full']:.2f} / {row['both_vs_full']:.2f}"
