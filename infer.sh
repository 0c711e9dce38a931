#!/usr/bin/env bash
# Sets the machine up once, then runs one case on all its ranks:  bash infer.sh [CASE] [--set section.key=value ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source tools/setup.sh
umbra_setup
exec .venv/bin/python -m executor.job.launch "$@"
