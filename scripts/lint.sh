#!/usr/bin/env bash
# What scripts/test.sh and the hook of pre-commit check before any test: ruff and mypy.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh dev
.venv/bin/ruff format --check .
.venv/bin/ruff check .
.venv/bin/mypy
