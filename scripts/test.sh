#!/usr/bin/env bash
# Everything CI checks: ruff, mypy and pytest in .venv. Arguments go to pytest.
# --oldest, --newest: the tests that depend most on libraries, a few cases of each, with the oldest
# releases that pyproject.toml allows, or with the newest, in an environment of their own.
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTHONDONTWRITEBYTECODE # or each of the many processes compiles the files of razorctl anew
case "${1:-}" in
--oldest | --newest)
  scripts/setup.sh "$1" dev
  venv=.venv$1
  exec "${venv/--/-}/bin/pytest" -n auto --no-loadscope-reorder --few 1 tests/layers tests/surgery \
    tests/test_models.py tests/test_heads.py tests/memory tests/training/test_callback.py \
    tests/training/test_compiled.py tests/training/test_entities.py tests/training/test_texts.py \
    tests/training/test_doctor.py tests/test_private_names.py "${@:2}"
  ;;
esac
scripts/lint.sh
.venv/bin/pytest -n auto --no-loadscope-reorder "$@"  # tests/conftest.py says which come first
