"""Compares three ways to fine-tune, of which full does not fit the memory that is given.

    .venv/bin/python scripts/bench/compared.py

`razorctl compare` fine-tunes the BERT of pretrained.py on news by each method with three seeds, on
one core, and says which method to take for 1.5 GB. Ten steps are few, and enough for these news. The
rows and the advice of `compare --json` go to results/compared.json, from which report.py writes a
table and picture.py draws a picture. The runs stay in the cache, so that an interrupted script goes
on, and `compare` makes a report of them.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from files import bert, in_cache, r8
from pretrained import CACHE
from record import device_name, head, options, write

TESTED = 400  # news
SETTINGS = {
    "methods": "full,checkpoint,razor",
    "seeds": 3,
    "vram": "1.5GB",
    "batch-size": 64,
    "input-size": 64,
    "steps": 10,
    "evaluate-every": 10,
    "optimizer": "adamw",
    "lr": 3e-4,
    "warmup-steps": 2,
    "precision": "fp32",
    "device": "cpu",
}
KEYS = ("metric", "shared", "memory", "target", "budget_bytes", "seeds", "take")


@in_cache("compared", tested=TESTED)
def fewer(cache: Path, folder: Path) -> None:
    """The news of files.py, with fewer of them to test with."""
    for split in ("train", "validation", "test"):
        lines = (r8(cache) / f"{split}.csv").read_text("utf-8").splitlines(keepends=True)
        rows = lines[: 1 + TESTED] if split == "test" else lines
        (folder / f"{split}.csv").write_text("".join(rows), "utf-8")


def main() -> None:
    parser = options(__doc__, "compared")
    parser.add_argument("--cache", type=Path, default=CACHE)
    args, more = parser.parse_known_args()
    words = [sys.executable, "-m", "razorctl", "compare", str(bert(args.cache))]
    words += [str(fewer(args.cache)), "--out", str(args.cache / "compared"), "--resume", "--json"]
    words += [word for name, value in SETTINGS.items() for word in (f"--{name}", str(value))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([*words, *more], env=environment, check=True, stdout=subprocess.PIPE)
    document = json.loads(ran.stdout)
    for row in document["rows"]:
        del row["run_dirs"]
    kept = {name: document[name] for name in KEYS}
    kept["shared"] = {name: v for name, v in kept["shared"].items() if name in JOB}
    write(
        args.out, {**head(device_name(), "torch", "transformers"), **kept, "rows": document["rows"]}
    )
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
