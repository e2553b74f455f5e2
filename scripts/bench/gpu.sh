#!/usr/bin/env bash
# GPU tests, then whole_step.py, in under 8 minutes on a machine with a CUDA device: one JSON.
#
#     scripts/bench/gpu.sh
#
# Needs torch, timm, transformers and pytest, no network and no installed razorctl. Arguments go to
# whole_step.py; `--device cpu --smoke` rehearses on a machine without a CUDA device. A failed test
# ends it with 1, but its result still has the times.
set -euo pipefail
cd "$(dirname "$0")/../.."

TEST_SECONDS=200
STEP_SECONDS=210

if [[ -z ${PYTHON:-} ]]; then
  PYTHON=python3
  if [[ -x .venv/bin/python ]]; then PYTHON=.venv/bin/python; fi
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

files=(tests/ops tests/rules tests/sampling tests/surgery/test_methods.py tests/layers)
select=cuda
if [[ " $* " == *" --device cpu "* && " $* " == *" --smoke "* ]]; then
  files=(tests/ops)
  select=cpu
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

"$PYTHON" scripts/bench/whole_step.py --tests "$work/tests.json" --seconds "$STEP_SECONDS" "$@"
exit "$((tests != 0))"
