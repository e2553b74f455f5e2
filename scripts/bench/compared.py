"""Compares three ways to fine-tune, of which full does not fit the memory that is given.

    .venv/bin/python scripts/bench/compared.py

`razorctl compare` fine-tunes DINOv2's ViT-S/14, pretrained, on Fashion-MNIST by each method with
three seeds, and says which one to take for 1.2 GB. Its document goes to results/compared.json, from
which report.py writes a table and picture.py draws a picture.
"""

import json
import subprocess
import sys
import tempfile

from accuracy import job_of
from files import TASKS
from pretrained import CACHE
from record import device_name, head, options, write

SETTINGS = (
    "--batch-size 64 --steps 24 --lr 6e-5 --methods full,checkpoint,razor --vram 1.2GB --seeds 3"
)


def main() -> None:
    args = options(__doc__, "compared").parse_args()
    job = job_of(TASKS["fashion"], "fp32", CACHE)
    words = [sys.executable, "-m", "razorctl", "compare", job.model, job.dataset, *SETTINGS.split()]
    words += ["--task", str(job.task), "--input-size", str(job.input_size), "--optimizer", "adamw"]
    with tempfile.TemporaryDirectory() as folder:
        words += ["--device", "cpu", "--out", f"{folder}/runs", "--json"]
        ran = subprocess.run(words, check=True, stdout=subprocess.PIPE)
    document = json.loads(ran.stdout)
    for name in ("command", "model", "dataset"):  # which head or `shared` has too
        del document[name]
    document["shared"] |= {"model": "vit-s14", "dataset": "./fashion"}  # no local folders
    for row in document["rows"]:
        del row["run_dirs"]
    write(args.out, {**head(device_name("cpu"), "torch", "timm"), "settings": SETTINGS, **document})
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
