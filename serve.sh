#!/usr/bin/env bash
# Sets the machine up once, then serves a case or a checkpoint to OpenAI clients:  bash serve.sh [CASE, FOLDER, FILE.gguf or ORG/NAME] [--port N] [--set KEY=VALUE ...]
# Without CASE it is demo_serve at http://127.0.0.1:8000. docs/serving.md has what the server can do.
set -euo pipefail
from=$PWD # where relative paths start
cd "$(dirname "${BASH_SOURCE[0]}")"
source tools/setup.sh
umbra_setup
umbra=$PWD/.venv/bin/umbra
cd "$from"
exec "$umbra" serve "$@"
