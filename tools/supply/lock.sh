#!/usr/bin/env bash
# Writes the lock files from pyproject.toml with uv: every package that they need, with the hashes of all its files
#
#     .venv/bin/python -m pip install --target build/supply --no-deps --require-hashes -r tools/supply/locks/supply.lock
#     bash tools/supply/lock.sh [--upgrade]
#
# Packages that are locked already keep their version; `--upgrade` takes the newest one of those that no requirement pins.
# PyTorch has lock files of its own, because two builds of one version differ in what they need, and no marker tells them
# apart: that of the index (torch-cuda.lock) loads CUDA's libraries when it is imported, also on a machine without a GPU; one
# for CPUs, where pip is set up to find it, does not. The index does not have the latter: torch-cpu.lock is written by hand.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
locks=tools/supply/locks upgrade=("$@")
heading="# Made from pyproject.toml by \`bash tools/supply/lock.sh\`: change that, then run it."

# compile FILE ARGUMENTS: uv keeps the versions that it finds in FILE.
compile() {
    build/supply/bin/uv pip compile --quiet --universal --python-version 3.10 --generate-hashes --annotation-style line \
        --no-header "${upgrade[@]}" --output-file "$@" >/dev/null
}

all=$(mktemp) run=$(mktemp)
trap 'rm "$all" "$run"' EXIT
touch "$locks/dev.lock"
cat "$locks"/{main,dev,torch-cuda}.lock >"$all"
compile "$all" --group dev --group build pyproject.toml
cp "$all" "$run"
compile "$run" --group build pyproject.toml # in the same versions
for name in main dev torch-cuda; do
    echo "$heading" >"$locks/$name.lock"
    awk -v name=$name '
        NR == FNR { if (/^[^ ]/) runs[$1]; next }
        /^[^ ]/ { lock = /^(torch|triton|nvidia-|cuda-)/ ? "torch-cuda" : $1 in runs ? "main" : "dev" }
        lock == name' "$run" "$all" >>"$locks/$name.lock"
done
for name in ascend compare cuda fuzz supply; do
    options=(--constraint "$locks/main.lock" --constraint "$locks/dev.lock")
    [[ $name != @(ascend|cuda) ]] || options+=(--no-deps) # what they need beside is in .venv
    compile "$locks/$name.lock" "${options[@]}" --group "$name"
    sed -i "1i $heading" "$locks/$name.lock"
done
