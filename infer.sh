#!/usr/bin/env bash
# Sets the machine up once, then runs one case on all its ranks:  bash infer.sh [CASE] [--set section.key=value ...]
# --list, --plan, --chat and --clear-cache do what `umbra list`, `plan`, `chat` and `clear-cache` do; --help shows all.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source tools/setup.sh
umbra_setup
command=run
arguments=()
for word in "$@"; do
    case $word in
    --list) exec .venv/bin/python -m umbra list ;;
    --help | -h) exec .venv/bin/python -m umbra --help ;;
    --plan | --chat | --clear-cache) command=${word#--} ;;
    *) arguments+=("$word") ;;
    esac
done
exec .venv/bin/python -m umbra "$command" "${arguments[@]}"
