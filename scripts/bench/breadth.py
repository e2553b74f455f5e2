"""The sections of the measurements page on many models: architectures and foreign ones."""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import product
from statistics import median

from pages import RESULTS, Row, load, source, table

SHARES = (0.1, 0.15, 0.25, 0.5, 10)  # of full's bytes, upper ends


def architectures() -> str:
    document = load("architectures")
    rows = sorted(document["rows"], key=lambda row: row["cosine"])
    cut = sum(bool(row["options"]) for row in rows)
    faults = [f"`{row['model']}`: {', '.join(row['faults'])}" for row in rows if row["faults"]]
    each = any(row.get("worst") for row in rows)  # older results have none
    same = not any("forward pass" in fault for fault in faults)
    return (
        f"timm defines its models in {len(rows)} files. Here "
        f"`{document['recipe']['method']}` runs at ratio {document['recipe']['ratio']} on the "
        "smallest model of each file, in fp32, with\nrandom weights and images; "
        f"{cut} of these models are cut down further. "
        + ("Every forward pass is stock's to the bit.\n" if same else "")
        + (f"Faults: {'; '.join(faults)}.\n" if faults else "")
        + f"The cosine of the whole gradient to the exact one is {rows[0]['cosine']:.5f} or "
        "more.\n\n"
        + source("architectures", document)
        + "<details><summary>Every model, lowest cosine first</summary>\n\n"
        + table(
            [
                "model",
                "pixels",
                "swapped modules",
                "cosine",
                *(["worst parameter"] if each else []),
            ],
            [
                [f"`{r['model']}`", r["pixels"], r["swapped"], f"{r['cosine']:.5f}"]
                + ([f"{r['worst']['cosine']:.4f}" if r.get("worst") else ""] if each else [])
                for r in rows
            ],
        )
        + "\n</details>\n"
    )


def foreign() -> str:
    """The section on models that nobody fitted razor to, empty if that was not measured."""
    if not (RESULTS / "foreign.json").exists():
        return ""
    document = load("foreign")
    rows, left_out, listed = (
        document["rows"],
        document["left_out"],
        sum(document["listed"].values()),
    )
    faulty = [row for row in rows if row["faults"]]
    met = sum(bool(row.get("share_within")) for row in rows)
    bars = document["cosines_at_least"]
    return (
        f"{len(rows)} small models of random weights, at ratio {document['ratio']}: how many keep "
        "which share of full's bytes, and the cosine of the whole gradient to\nfull's at the same "
        "precision. `sparsify` knows no batch; `sparsify_within`, which the commands use, traces "
        f"one and meets the ratio, or refuses it\nwith the reason: in fp32 it meets it on {met} "
        f"({met / len(rows):.0%}). {len(rows) - len(faulty)} have no fault: the forward pass is "
        "stock's to the bit, every parameter has its gradient, the\ncosine is at least "
        f"{bars['0.9']} (at ratio 0.5 {bars['0.5']}; in bf16 {bars['0.9']} less "
        f"{document['roundings']} times what bf16 takes from full's own), and `restore` brings the "
        f"stock classes\nback. The list has {listed} models; {len(rows) + len(left_out)} have been "
        f"tried, of which {len(left_out)} are left out: {causes(left_out.values())}.\n"
        f"{sum('bf16' not in row for row in rows)} rows are of earlier code, without bf16.\n\n"
        + source("foreign", document)
        + table(
            ["library", "models", "precision", "by", *COLUMNS],
            [line for library in document["listed"] for line in lines(library, rows)],
        )
        + "\n"
        + table(
            ["library", "precision", "cosine of", "median", "lowest", "below 0.98"],
            [line for library in document["listed"] for line in cosines(library, rows)],
        )
        + "\n<details><summary>Faults, refusals and what keeps more than a tenth</summary>\n\n"
        + table(
            ["model", *(f"{way}, {precision}" for precision in PRECISIONS for way in WAYS), "why"],
            [
                [name(r), *(percent(part(r, p), way) for p in PRECISIONS for way in WAYS), why(r)]
                for r in rows
                if why(r)
            ],
        )
        + "\n</details>\n"
    )


COLUMNS = ("to 10 %", *(f"to {end:.0%}" for end in SHARES[1:-1]), "more", "refused")
WAYS = {"`sparsify`": "0.9", "`sparsify_within`": "within"}
PRECISIONS = ("fp32", "bf16")
# Type of an error -> why a model is left out.
CAUSES = {
    "SizeError": "is larger than 20 million parameters",
    "InputsError": "runs with none of the inputs that are known",
    "UnsteadyError": "does not repeat itself",
    "TimeoutError": "takes too long",
}


def causes(errors: Iterable[str]) -> str:
    """How many models are left out for which reason."""
    other = "cannot be made from its usual configuration"
    count = Counter(CAUSES.get(error.partition(":")[0], other) for error in errors)
    return ", ".join(f"{number} x {cause}" for cause, number in count.most_common())


def part(row: Row, precision: str) -> Row:
    """The part of a row for a precision, empty if the stock model has no step in it."""
    return row if precision == "fp32" else row.get("bf16") or {}


def parts(library: str, rows: list[Row], precision: str) -> list[Row]:
    own = (part(row, precision) for row in rows if row["library"] == library)
    return [row for row in own if row.get("full")]


def lines(library: str, rows: list[Row]) -> Iterator[list[object]]:
    """The models of a library by the share that they keep, those that are refused last."""
    for precision, (way, key) in product(PRECISIONS, WAYS.items()):
        if own := parts(library, rows, precision):
            shares = [row.get(f"share_{key}") for row in own]
            ends = Counter(next(e for e in SHARES if share <= e) for share in shares if share)
            refused = sum(not share for share in shares) or ""
            numbers = [*(ends[end] or "" for end in SHARES), refused]
            yield [library, len(own), precision, way, *numbers]


def cosines(library: str, rows: list[Row]) -> Iterator[list[object]]:
    """The cosines of a library by precision and way, and of full's own gradient in bf16."""
    for precision, (way, key) in product(PRECISIONS, [*WAYS.items(), ("`full` to fp32", "full")]):
        every = [row.get(f"cosine_{key}") for row in parts(library, rows, precision)]
        if known := sorted(cosine for cosine in every if cosine is not None):
            figures = [f"{median(known):.5f}", f"{known[0]:.4f}", sum(c < 0.98 for c in known)]
            yield [library, precision, way, *figures]


def name(row: Row) -> str:
    return f"{row['library']} `{row['model']}`"


def percent(row: Row, way: str) -> str:
    share = row.get(f"share_{WAYS[way]}")
    return f"{share:.1%}" if share else "-"


def why(row: Row) -> str:
    """The faults of a row, and why its ratio was refused."""
    refusals = dict.fromkeys(part(row, precision).get("refusal") for precision in PRECISIONS)
    return "; ".join([*row["faults"], *filter(None, refusals)]).replace("|", "\\|")
