#!/usr/bin/env bash
# GPU tests and benchmarks, in under 8 minutes on a machine with a CUDA device: one JSON.
#
#     scripts/bench/gpu.sh
#
# Runs the tests, roofline.py, linear.py, frontier.py and step.py, each within its seconds below,
# and prints a short table. The JSON is the result of step.py, results/step_cuda.json, which has
# those of the others. Needs torch, timm, transformers and pytest, no network and no installed
# razorctl. `--device cpu --smoke` rehearses on any machine, without limits on time, and leaves
# results/ as it is. A test or benchmark that fails or is cut off makes it end with 1; the JSON has
# all figures that were measured before.
set -euo pipefail
cd "$(dirname "$0")/../.."

TEST_SECONDS=125
ROOFLINE_SECONDS=70
LINEAR_SECONDS=40
FRONTIER_SECONDS=75
STEP_SECONDS=165

if [[ -z ${PYTHON:-} ]]; then
  PYTHON=python3
  if [[ -x .venv/bin/python ]]; then PYTHON=.venv/bin/python; fi
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

case "$*" in
  "")
    files=(tests/gpu/test_kernels.py tests/ops tests/rules tests/sampling tests/layers)
    select="cuda and not compiled"
    device=(--device cuda)
    roofline=(--device cuda)
    result=scripts/bench/results/step_cuda.json
    slack=1
    if ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
      echo "gpu.sh needs a CUDA device; --device cpu --smoke rehearses without one." >&2
      exit 1
    fi
    ;;
  "--device cpu --smoke")
    files=(tests/ops)
    select="cpu and not compiled"
    device=(--device cpu --smoke)
    roofline=(--smoke)
    result=$work/step_cpu.json # goes with it
    slack=100
    ;;
  *)
    echo "usage: scripts/bench/gpu.sh [--device cpu --smoke]" >&2
    exit 2
    ;;
esac

failed=0
include=()

# run NAME SECONDS OPTION ...: a benchmark, which is cut off after so many seconds.
run() {
  local name=$1 seconds=$(($2 * slack))
  shift 2
  if ! timeout -k 5 "$seconds" "$PYTHON" "scripts/bench/$name.py" --out "$work/$name.json" "$@" \
    >"$work/log" 2>&1; then
    failed=1
    echo "gpu.sh: $name.py failed, or took over $seconds s:" >&2
    tail -n 20 "$work/log" >&2
  fi
  if [[ -f $work/$name.json ]]; then include+=(--include "$name" "$work/$name.json"); fi
}

# most SECONDS: the seconds after which no turn starts, so that the last one can end.
most() { echo "$(($1 * slack * 3 / 4))"; }

# A config of our own: pyproject.toml asks for plugins that this machine may lack.
tests=0
PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 timeout -s INT -k 10 "$((TEST_SECONDS * slack))" \
  "$PYTHON" -m pytest -c /dev/null --rootdir . --confcutdir . --import-mode=importlib \
  -p no:cacheprovider -q --tb=short --maxfail=30 -k "$select" "${files[@]}" >"$work/log" 2>&1 ||
  tests=$?
((tests == 0)) || cat "$work/log" >&2
"$PYTHON" - "$tests" "$work/log" >"$work/tests.json" <<'PYTHON'
import json
import sys
from pathlib import Path

lines = Path(sys.argv[2]).read_text(errors="replace").splitlines()
failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
json.dump({"exit_status": int(sys.argv[1]), "summary": lines[-1:], "failed": failed}, sys.stdout)
PYTHON
include+=(--include tests "$work/tests.json")

run roofline "$ROOFLINE_SECONDS" "${roofline[@]}"
run linear "$LINEAR_SECONDS" "${device[@]}" --seconds "$(most "$LINEAR_SECONDS")"
run frontier "$FRONTIER_SECONDS" "${device[@]}" --seconds "$(most "$FRONTIER_SECONDS")"
run step "$STEP_SECONDS" "${device[@]}" --seconds "$(most "$STEP_SECONDS")" "${include[@]}"
if [[ ! -f $work/step.json ]]; then
  trap - EXIT
  echo "gpu.sh: no result of step.py; those of the others are in $work." >&2
  exit 1
fi
mv "$work/step.json" "$result"
"$PYTHON" scripts/bench/summary.py "$result"
exit "$((tests != 0 || failed != 0))"
