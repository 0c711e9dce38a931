#!/usr/bin/env bash
# Checks a machine with an NVIDIA GPU in one go and writes a table and JSON:  bash tools/gpu_check.sh; --help tells more.
# Takes the Python of .venv if there is one, else `python3`, with whatever packages it has: it installs nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=python3
[ ! -x .venv/bin/python ] || python=.venv/bin/python
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
exec "$python" -m umbra.tools.gpu_check "$@"
