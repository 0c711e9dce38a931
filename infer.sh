#!/usr/bin/env bash
# Sets this machine up once (a virtual environment in .venv, the native module), then continues prompts with a model:
#     bash infer.sh [MODEL] [--prompt TEXT ...] [--set KEY=VALUE ...]
# MODEL is a case of yaml_configs/ (default: demo), the folder of a checkpoint, a GGUF file, or a name on a hub (ORG/NAME).
# With --list, --plan, --chat or --clear-cache it runs that command of `umbra` instead of `umbra run`; --help lists all.
set -euo pipefail
from=$PWD # where relative paths start
cd "$(dirname "${BASH_SOURCE[0]}")"
source tools/setup.sh
umbra_setup
umbra=$PWD/.venv/bin/umbra
cd "$from"
command=run
arguments=()
for word in "$@"; do
    case $word in
    --list) exec "$umbra" list ;;
    --help | -h) exec "$umbra" --help ;;
    --plan | --chat | --clear-cache) command=${word#--} ;;
    *) arguments+=("$word") ;;
    esac
done
exec "$umbra" "$command" "${arguments[@]}"
