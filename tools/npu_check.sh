#!/usr/bin/env bash
# Checks an Ascend machine in one go and writes one report to send back:  bash tools/npu_check.sh; --help tells more.
# Source CANN's set_env.sh first. The machine is set up once, as by infer.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/setup.sh
umbra_setup
exec .venv/bin/python -m umbra.tools.npu_check "$@"
