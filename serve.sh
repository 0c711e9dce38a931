#!/usr/bin/env bash
# Sets this machine up once, then serves a model to clients of OpenAI's and Anthropic's APIs:
#     bash serve.sh [MODEL] [--port N] [--set KEY=VALUE ...]
# MODEL is a case of yaml_configs/ (default: demo_serve), the folder of a checkpoint, a GGUF file, or a name on a hub
# (ORG/NAME). The server is at http://127.0.0.1:8000 unless flags say otherwise; docs/serving.md describes it.
set -euo pipefail
from=$PWD # where relative paths start
cd "$(dirname "${BASH_SOURCE[0]}")"
source tools/setup.sh
umbra_setup
umbra=$PWD/.venv/bin/umbra
cd "$from"
exec "$umbra" serve "$@"
