#!/usr/bin/env bash
# Sets the machine up once, then runs the prompts of a case or a checkpoint:  bash infer.sh [CASE, FOLDER, FILE.gguf or ORG/NAME] [--prompt TEXT] [--set KEY=VALUE ...]
# --list, --plan, --chat and --clear-cache do what `umbra list`, `plan`, `chat` and `clear-cache` do; --help shows all.
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
