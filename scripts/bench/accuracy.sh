#!/usr/bin/env bash
# Accuracy and time to target of every method on real tasks; see accuracy.py, which has the options.
#
#     scripts/bench/accuracy.sh [--device cuda] [--precision bf16] [--grid core|full] [--tasks TASK ...]
set -euo pipefail
cd "$(dirname "$0")/../.."

if [[ -z ${PYTHON:-} ]]; then
  PYTHON=python3
  if [[ -x .venv/bin/python ]]; then PYTHON=.venv/bin/python; fi
fi
exec "$PYTHON" scripts/bench/accuracy.py "$@"
