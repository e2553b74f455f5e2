#!/usr/bin/env bash
# Everything CI checks: ruff, mypy and pytest in .venv. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh dev
.venv/bin/ruff format --check .
.venv/bin/ruff check .
.venv/bin/mypy
unset PYTHONDONTWRITEBYTECODE # or each of the many processes compiles the files of razorctl anew
.venv/bin/pytest -n auto --no-loadscope-reorder "$@"  # tests/conftest.py says which come first
