"""The sections of the measurements page on many models: architectures and foreign ones."""

from collections import Counter

from pages import RESULTS, Row, load, source, table

SHARES = (0.1, 0.15, 0.25, 0.5, 1.01)  # of full's bytes, upper ends


def architectures() -> str:
    document = load("architectures")
    rows = sorted(document["rows"], key=lambda row: row["cosine"])
    cut = sum(bool(row["options"]) for row in rows)
    faults = [f"{row['model']}: {', '.join(row['faults'])}" for row in rows if row["faults"]]
    return (
        f"timm defines its models in {len(rows)} files. Here "
        f"`{document['recipe']['method']}` runs at ratio {document['recipe']['ratio']} on the "
        "smallest model of each file, in fp32, with\nrandom weights and images; "
        f"{cut} of these models are cut down further. "
        + (f"Faults: {'; '.join(faults)}" if faults else "Every forward pass is stock's to the bit")
        + f".\nThe cosine of the whole gradient to the exact one is {rows[0]['cosine']:.5f} or "
        "more.\n\n"
        + source("architectures", document)
        + "<details><summary>Every model, lowest cosine first</summary>\n\n"
        + table(
            ["model", "pixels", "swapped modules", "cosine"],
            [[f"`{r['model']}`", r["pixels"], r["swapped"], f"{r['cosine']:.5f}"] for r in rows],
        )
        + "\n</details>\n"
    )


def foreign() -> str:
    """The section on models that nobody fitted razor to, empty if that was not measured."""
    if not (RESULTS / "foreign.json").exists():
        return ""
    document = load("foreign")
    rows = document["rows"]
    libraries = list(dict.fromkeys(row["library"] for row in rows))
    faulty = [row for row in rows if row["faults"]]
    met = sum(bool(row.get("share_within")) for row in rows)

    def counts(library: str, key: str) -> list[object]:
        """The models of a library by the share that they keep, those that are refused last."""
        own = [row for row in rows if row["library"] == library]
        ends = Counter(next(e for e in SHARES if row[key] <= e) for row in own if row.get(key))
        return [*(ends[end] or "" for end in SHARES), sum(not row.get(key) for row in own) or ""]

    columns = ["to 10 %", *(f"to {end:.0%}" for end in SHARES[1:-1]), "more", "refused"]
    ways = {"share_0.9": "`sparsify`", "share_within": "`sparsify_within`"}
    counted = [
        [library, len([r for r in rows if r["library"] == library]), way, *counts(library, key)]
        for library in libraries
        for key, way in ways.items()
    ]
    return (
        f"{len(rows)} small models of random weights, in fp32, at ratio {document['ratio']}: how "
        "many keep which share of full's bytes. `sparsify` knows no\nbatch; `sparsify_within`, "
        "which the commands use, traces one and meets the ratio, or refuses it with the reason: it "
        f"meets it on {met} ({met / len(rows):.0%}). "
        f"{len(rows) - len(faulty)} have no\nfault: the forward pass is stock's to the bit in fp32 "
        "and under bf16 autocast, every parameter has its gradient, the cosine of all\nis at least "
        f"{document['cosines_at_least']['0.9']} (at ratio 0.5 {document['cosines_at_least']['0.5']}"
        "), and `restore` brings the stock classes back.\n\n"
        + source("foreign", document)
        + table(["library", "models", "by", *columns], counted)
        + "\n<details><summary>Faults, refusals and what keeps more than a tenth</summary>\n\n"
        + table(
            ["model", "`sparsify`", "`sparsify_within`", "why"],
            [
                [name(r), percent(r, "share_0.9"), percent(r, "share_within"), why(r)]
                for r in rows
                if r["faults"] or not r.get("share_within")
            ],
        )
        + f"\n</details>\n\n{len(document['left_out'])} classes are left out: this script cannot "
        "make them small, or does not know their inputs; the file says which.\n"
    )


def name(row: Row) -> str:
    return f"{row['library']} `{row['model']}`"


def percent(row: Row, key: str) -> str:
    return f"{row[key]:.1%}" if row.get(key) else "-"


def why(row: Row) -> str:
    """The faults of a row, and why its ratio was refused."""
    reasons = [*row["faults"], *([row["refusal"]] if row.get("refusal") else [])]
    return "; ".join(reasons).replace("|", "\\|")
