#!/usr/bin/env bash
# GPU tests, then whole_step.py, in under 8 minutes on a machine with a CUDA device: one JSON.
#
#     scripts/bench/gpu.sh
#
# Needs torch, timm, transformers and pytest, no network and no installed razorctl. Arguments go to
# whole_step.py; `--device cpu --smoke` rehearses on a machine without a CUDA device.
set -euo pipefail
cd "$(dirname "$0")/../.."

TEST_SECONDS=200
ALL_SECONDS=470

if [[ -z ${PYTHON:-} ]]; then
  PYTHON=python3
  if [[ -x .venv/bin/python ]]; then PYTHON=.venv/bin/python; fi
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

select="cuda or gpu"
if [[ " $* " == *" --device cpu "* && " $* " == *" --smoke "* ]]; then
  select=cpu
elif ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "gpu.sh needs a CUDA device; --device cpu --smoke rehearses without one." >&2
  exit 1
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Every file that takes `device`, but for those whose imports this machine lacks.
"$PYTHON" - > "$work/files" <<'PYTHON'
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

folders = [Path("tests", name) for name in ("ops", "layers", "families", "gpu")]
files = sorted(file for folder in folders for file in folder.glob("**/test_*.py"))
files += [Path("tests", f"test_{name}.py") for name in ("rules", "sampling", "surgery", "memory")]
for file in filter(Path.exists, files):
    spec = spec_from_file_location("probe", file)
    try:
        spec.loader.exec_module(module_from_spec(spec))
    except ModuleNotFoundError as error:
        if error.name.split(".")[0] != "razorctl":
            print(f"{file} is left out: no {error.name} here", file=sys.stderr)
            continue
    except BaseException:
        pass  # a skip, or what pytest will report
    print(file)
PYTHON
mapfile -t files < "$work/files"
if [[ $select == cpu ]]; then files=(tests/ops); fi # enough to rehearse with

# A config and plugins of our own: pyproject.toml asks for plugins that this machine may lack.
status=0
PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 timeout -s INT -k 10 "$TEST_SECONDS" \
  "$PYTHON" -m pytest -c /dev/null --rootdir . --confcutdir . --import-mode=importlib \
  -p no:cacheprovider -q --tb=short -k "$select" "${files[@]}" 2>&1 |
  tee "$work/log" >&2 || status=$?

"$PYTHON" - "$status" "$TEST_SECONDS" "$work/log" > "$work/tests.json" <<'PYTHON'
import json
import re
import sys
from pathlib import Path

status, limit = int(sys.argv[1]), sys.argv[2]
lines = Path(sys.argv[3]).read_text(errors="replace").splitlines()
summary = next((line for line in reversed(lines) if re.search(r" in [\d.]+s", line)), "no summary")
counts = {what: int(n) for n, what in re.findall(r"(\d+) (passed|failed|error)", summary)}
failed = counts.get("failed", 0) + counts.get("error", 0)
if status and not failed:
    failed = None  # unknown: the run did not end by itself, or found no test
    why = f"stopped after {limit} s" if status in (124, 137) else f"exit status {status}"
    summary = f"{summary} ({why})"
json.dump({"passed": counts.get("passed", 0), "failed": failed, "summary": summary}, sys.stdout)
PYTHON

status=0
timeout -k 10 "$((ALL_SECONDS - SECONDS))" \
  "$PYTHON" scripts/bench/whole_step.py --tests "$work/tests.json" "$@" || status=$?
if [[ $status == 124 ]]; then
  echo "the benchmark was stopped; the JSON holds what it had." >&2
fi
exit "$status"
