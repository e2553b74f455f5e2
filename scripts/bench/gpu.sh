#!/usr/bin/env bash
# What a CUDA card says of razorctl, in 8 minutes: of each part a JSON file and a short table.
#
#     scripts/bench/gpu.sh [OUT]
#     scripts/bench/gpu.sh --smoke [OUT]    rehearses on a CPU, with tiny models
#
# Results go to the folder OUT, or to scripts/bench/results (a rehearsal's to a folder that goes).
# What matters most comes first: a training step by every method beside full; the kernels that a
# step spends its time in; layers, and a dozen cases of each kernel, against what they stand for; the
# times of steps, of a linear layer, and of steps at every ratio. A part is cut off when its end below has come; what it has written
# after each row is left. gpu.log has all output. Needs torch, timm, transformers, pytest with xdist
# and a C compiler; no network and no installed razorctl. Ends with 1 if a part failed or was cut.
set -euo pipefail
here=$PWD
cd "$(dirname "$0")/../.."

declare -A END=(  # seconds after the start
  [first]=110 [phases]=220 [layers]=265 [kernels]=325 [step]=430 [linear]=450 [frontier]=480
)
if [[ -z ${PYTHON:-} ]]; then
  PYTHON=python3
  if [[ -x .venv/bin/python ]]; then PYTHON=.venv/bin/python; fi
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

kind=cuda slack=1 options=(--device cuda)
if [[ ${1:-} == --smoke ]]; then
  kind=cpu slack=100 options=(--device cpu --smoke)
  shift
elif ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "gpu.sh needs a CUDA device; --smoke rehearses without one." >&2
  exit 1
fi
out=${1:-$PWD/scripts/bench/results}
[[ $out == /* ]] || out=$here/$out
if [[ $kind == cpu && $# == 0 ]]; then
  out=$(mktemp -d)
  trap 'rm -rf "$out"' EXIT
fi
mkdir -p "$out"
: >"$out/gpu.log"
failed=0

# part NAME ARGUMENT ...: runs Python until the end of the part.
part() {
  local name=$1 status=0 result=$out/${1}_$kind.json
  rm -f "$result"
  echo "== $name, $(left "$name") s" | tee -a "$out/gpu.log"
  timeout -k 5 "$(left "$name")" "$PYTHON" "${@:2}" >"$out/part.log" 2>&1 || status=$?
  cat "$out/part.log" >>"$out/gpu.log"
  if ((status != 0)); then
    failed=1
    echo "gpu.sh: $name failed, or was cut off:" >&2
    tail -n 15 "$out/part.log" >&2
  fi
  rm "$out/part.log"
  "$PYTHON" scripts/bench/summary.py "$result" || failed=1
}

left() { # NAME: the seconds until the end of a part
  local seconds=$((END[$1] * slack - SECONDS))
  echo "$((seconds > 0 ? seconds : 1))"
}

bench() { # NAME OPTION ...: a benchmark
  part "$1" "scripts/bench/$1.py" --out "$out/${1}_$kind.json" "${@:2}"
}

turns() { # NAME: a benchmark that starts nothing in its last quarter
  bench "$1" "${options[@]}" --seconds "$(($(left "$1") * 3 / 4))"
}

check() { # NAME FOLDER OPTION ...: tests, each by any of the processes
  part "$1" -m pytest -p no:cacheprovider -q --tb=short --dist load -n "$processes" \
    --rows "$out/${1}_$kind.json" "${@:2}"
}

processes=$(nproc)
((processes <= 8)) || processes=8
bench first "${options[@]}"
bench phases "${options[@]}"
check layers tests/layers --few 4 -k "$kind and not compiled"
if [[ $kind == cuda ]]; then
  check kernels tests/gpu/test_kernels.py --few 12
else
  check kernels tests/ops --few 1 -k "cpu and not compiled"
fi
turns step
turns linear
turns frontier
exit "$failed"
