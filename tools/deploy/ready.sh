#!/usr/bin/env bash
# Whether this pod of a server is ready: node 0 if it takes requests, the other nodes always.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
[ "${HOSTNAME##*-}" != 0 ] ||
    .venv/bin/python -c "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health/ready', timeout=5)"
