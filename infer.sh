#!/usr/bin/env bash
# Sets the machine up once, then runs one case on all its ranks:  bash infer.sh [CASE] [--set section.key=value ...]
# bash infer.sh --help shows everything else that it can do; bash infer.sh --chat CASE talks to the model.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source tools/setup.sh
umbra_setup
exec .venv/bin/python -m umbra run "$@"
