#!/usr/bin/env bash
# Sets the machine up once, then runs every check and test:  bash test.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source tools/setup.sh
umbra_setup
for tool in aarch64-linux-gnu-g++ qemu-aarch64; do
    command -v "$tool" >/dev/null || {
        (umbra_apt --no-install-recommends g++-aarch64-linux-gnu qemu-user) || echo "the ARM tests will be skipped" >&2
        break
    }
done
echo "== ruff"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
echo "== mypy"
.venv/bin/mypy
echo "== pytest"
exec .venv/bin/python -m pytest "$@"
