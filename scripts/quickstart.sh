#!/usr/bin/env bash
# From a fresh clone to a fine-tuned model: makes .venv, installs razorctl, runs the main job.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
.venv/bin/razorctl finetune vit-micro digits --ratio 0.9 "$@"
cat >&2 <<'NEXT'

Activate the environment in this directory, then try:
  source .venv/bin/activate
  razorctl plan vit-b16 cifar100 --gpu rtx-4090
  razorctl profile vit-micro digits
  razorctl compare vit-micro digits --methods full,checkpoint,razor --batch-size 512 --steps 20 --vram 1GB --html report.html
NEXT
