"""Compares three ways to fine-tune, of which full does not fit the memory that is given.

    .venv/bin/python scripts/bench/compared.py

It is the last command of scripts/quickstart.sh with three seeds: `razorctl compare` fine-tunes
vit-micro, which is pretrained on Fashion-MNIST, on digits by each method, and says which one to
take for 1 GB. Its document goes to results/compared.json, from which report.py writes a table.
"""

import json
import subprocess
import sys
import tempfile

from record import device_name, head, options, write

SETTINGS = "--batch-size 512 --steps 20 --vram 1GB --methods full,checkpoint,razor --seeds 3"


def main() -> None:
    args = options(__doc__, "compared").parse_args()
    words = [sys.executable, "-m", "razorctl", "compare", "vit-micro", "digits", *SETTINGS.split()]
    with tempfile.TemporaryDirectory() as folder:
        words += ["--device", "cpu", "--out", f"{folder}/runs", "--json"]
        ran = subprocess.run(words, check=True, stdout=subprocess.PIPE)
    document = json.loads(ran.stdout)
    for row in document["rows"]:
        del row["run_dirs"]
    write(args.out, {**head(device_name(), "torch", "timm"), "settings": SETTINGS, **document})
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
