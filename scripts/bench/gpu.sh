#!/usr/bin/env bash
# GPU tests and benchmarks, in under 8 minutes on a machine with a CUDA device: one JSON.
#
#     scripts/bench/gpu.sh
#
# Runs the tests, roofline.py, linear.py and step.py, whose result has those of the others.
# Needs torch, timm, transformers and pytest, no network and no installed razorctl. Arguments go to
# step.py; `--device cpu --smoke` rehearses on a machine without a CUDA device. A failed test
# or benchmark ends it with 1, but its result still has the other figures.
set -euo pipefail
cd "$(dirname "$0")/../.."

TEST_SECONDS=150
ROOFLINE_SECONDS=70
LINEAR_SECONDS=50
STEP_SECONDS=150

if [[ -z ${PYTHON:-} ]]; then
  PYTHON=python3
  if [[ -x .venv/bin/python ]]; then PYTHON=.venv/bin/python; fi
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

files=(tests/gpu/test_kernels.py tests/ops tests/rules tests/sampling tests/layers)
select="cuda and not compiled"
roofline=(--device cuda)
linear=(--device cuda --seconds "$LINEAR_SECONDS")
if [[ " $* " == *" --device cpu "* && " $* " == *" --smoke "* ]]; then
  files=(tests/ops)
  select="cpu and not compiled"
  roofline=(--smoke)
  linear=(--device cpu --smoke)
elif ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "gpu.sh needs a CUDA device; --device cpu --smoke rehearses without one." >&2
  exit 1
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# A config of our own: pyproject.toml asks for plugins that this machine may lack.
tests=0
PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 timeout -s INT -k 10 "$TEST_SECONDS" \
  "$PYTHON" -m pytest -c /dev/null --rootdir . --confcutdir . --import-mode=importlib \
  -p no:cacheprovider -q --tb=short --maxfail=30 -k "$select" "${files[@]}" >"$work/log" 2>&1 ||
  tests=$?
cat "$work/log" >&2
"$PYTHON" - "$tests" "$work/log" >"$work/tests.json" <<'PYTHON'
import json
import sys
from pathlib import Path

lines = Path(sys.argv[2]).read_text(errors="replace").splitlines()
failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
json.dump({"exit_status": int(sys.argv[1]), "summary": lines[-1:], "failed": failed}, sys.stdout)
PYTHON

include=(--include tests "$work/tests.json")
failed=0
timeout "$ROOFLINE_SECONDS" "$PYTHON" scripts/bench/roofline.py "${roofline[@]}" \
  --out "$work/roofline.json" && include+=(--include roofline "$work/roofline.json") || failed=1
timeout "$((LINEAR_SECONDS + 30))" "$PYTHON" scripts/bench/linear.py "${linear[@]}" \
  --out "$work/linear.json" && include+=(--include linear "$work/linear.json") || failed=1
"$PYTHON" scripts/bench/step.py "${include[@]}" --seconds "$STEP_SECONDS" "$@"
exit "$((tests != 0 || failed != 0))"
