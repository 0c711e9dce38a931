#!/usr/bin/env bash
# Sets the machine up once, then serves a case to OpenAI clients:  bash serve.sh [CASE] [--restarts N] [--set section.key=value ...]
# Without CASE it is demo_serve at http://127.0.0.1:8000. docs/serving.md has what the server can do.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source tools/setup.sh
umbra_setup
exec .venv/bin/python -m umbra serve "$@"
