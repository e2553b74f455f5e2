#!/usr/bin/env bash
# Builds the sdist and the wheel: scripts/build.sh [FOLDER], dist without one.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh dev
exec .venv/bin/python -m hatchling build -d "${1:-dist}"
