#!/usr/bin/env bash
# From a fresh clone to a fine-tuned model: makes .venv, installs razorctl, runs the main job.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
.venv/bin/razorctl finetune vit-micro digits --ratio 0.9 "$@"
