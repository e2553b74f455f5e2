#!/usr/bin/env bash
# What a CUDA card says of razorctl, in 7 minutes: of each part a JSON file and a short table.
#
#     scripts/bench/gpu.sh [--more] [OUT]
#     scripts/bench/gpu.sh [--more] --smoke [OUT]    rehearses on a CPU, with tiny models
#
# Results go to the folder OUT, or to scripts/bench/results (a rehearsal's to a folder that goes).
# What matters most comes first: a training step by every method beside full; copies, attention and
# products by every way; the kernels that a step spends its time in, and its memory; a dozen cases
# of each kernel against what they stand for; ViT-L/16; finetune with defaults. --more runs what can
# wait, in 5 minutes: layers against what they stand for, and the times of steps, of a linear layer,
# and of steps at every ratio. A part is cut off when its end below has come; what it has written
# after each row is left. gpu.log has all output. Needs torch, timm, transformers, pytest with xdist
# and a C compiler, for finetune pydantic; no network and no installed razorctl. Ends with 1 if a
# part failed or was cut.
set -euo pipefail
here=$PWD
cd "$(dirname "$0")/../.."

declare -A END=(  # seconds after the start
  [first]=100 [products]=140 [phases]=250 [kernels]=300 [large]=345 [finetune]=420
  [layers]=60 [step]=170 [linear]=200 [frontier]=300
)
if [[ -z ${PYTHON:-} ]]; then
  PYTHON=python3
  if [[ -x .venv/bin/python ]]; then PYTHON=.venv/bin/python; fi
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

kind=cuda slack=1 options=(--device cuda) more=
if [[ ${1:-} == --more ]]; then more=$1 && shift; fi
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
[[ $more ]] || : >"$out/gpu.log"
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

kernels_of() { # NAME: a part of phases.py
  part "$1" scripts/bench/phases.py --part "$1" --out "$out/${1}_$kind.json" "${options[@]}"
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
if [[ $more ]]; then
  check layers tests/layers --few 4 -k "$kind and not compiled"
  turns step
  turns linear
  turns frontier
  exit "$failed"
fi
bench first "${options[@]}"
kernels_of products
kernels_of phases
if [[ $kind == cuda ]]; then
  check kernels tests/gpu/test_kernels.py --few 12
else
  check kernels tests/ops --few 1 -k "cpu and not compiled"
fi
kernels_of large
kernels_of finetune
exit "$failed"
