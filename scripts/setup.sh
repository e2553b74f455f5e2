#!/usr/bin/env bash
# Makes .venv with razorctl and the named extras: scripts/setup.sh [--oldest | --newest] [EXTRA ...]
# Installs again only when pyproject.toml, constraints.txt or the extras have changed.
# --oldest: makes .venv-oldest, with the oldest release that pyproject.toml allows of each library
# whose code razorctl knows; all else is the newest. --newest: makes .venv-newest, without pins.
set -euo pipefail
cd "$(dirname "$0")/.."
known="torch|torchvision|timm|transformers|peft"

venv=.venv
constraints=$(cat constraints.txt)
case "${1:-}" in
--oldest)
  venv=.venv-oldest
  constraints=$(sed -nE "s/^  \"($known)>=(.*)\",/\1==\2.*/p" pyproject.toml)
  shift
  ;;
--newest)
  venv=.venv-newest
  constraints=""
  shift
  ;;
esac

need() { # COMMAND-THAT-MUST-WORK PACKAGE: installs a missing Debian package where it may
  if eval "$1" >/dev/null 2>&1; then return; fi
  local sudo=""
  [ "$(id -u)" = 0 ] || sudo="sudo"
  if ! command -v apt-get >/dev/null; then
    echo "setup: install $2 and run this again." >&2
    exit 1
  fi
  $sudo apt-get update -qq && $sudo apt-get install -y -qq --no-install-recommends "$2" >/dev/null
}

python=""
for candidate in python3 python3.13 python3.12 python3.11; do
  if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    python="$candidate"
    break
  fi
done
if [ -z "$python" ]; then
  echo "setup: razorctl needs Python 3.11 or newer; install it and run this again." >&2
  exit 1
fi

extras=" $* "
stamp=$venv/razorctl.stamp
# An earlier call's extras stay: test.sh after quickstart.sh only adds to what is there.
[ -f "$stamp" ] && extras="$extras $(sed -n 2p "$stamp") "
extras=$(echo "$extras" | tr ' ' '\n' | sort -u | xargs)
wanted=$(printf '%s\n%s' "$({ cat pyproject.toml && echo "$constraints"; } | sha256sum)" "$extras")
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then exit 0; fi

if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then # missing, or left half made
  need "$python -c 'import ensurepip'" python3-venv
  "$python" -m venv --clear "$venv"
fi
echo "setup: installing razorctl${extras:+ with $extras} into $venv (torch is large: some minutes)"
echo "$constraints" >"$venv/constraints.txt"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c "$venv/constraints.txt" \
  -e ".${extras:+[${extras// /,}]}"
printf '%s\n' "$wanted" >"$stamp"
