#!/usr/bin/env bash
# Runs tools/mutants: in a copy of the tree that stands in its place, and in namespaces in which no mutant can end other
# processes, reach the network or write into the tree
#
#     bash tools/mutants.sh COPY map|run|again|native|report WORK ...      COPY: a folder; made if it is not there
#
# Where tests of tests/ascend are named, all of this runs in their Python, on the fake CANN.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/setup.sh
umbra_setup
[[ " $*" != *" tests/ascend"* ]] || umbra_setup_ascend
tree=$PWD copy=$(realpath -m "$1")
shift
if [ ! -e "$copy" ]; then
    mkdir -p "$copy/.venv" "$copy/home" "$copy/tmp"
    { git ls-files -co --exclude-standard -z && find ops/cpu -maxdepth 1 \( -name "_native*.so" -o -name .built \) -print0; } |
        xargs -0 cp --parents -t "$copy"
fi
user=(--map-root-user)
[ "$(id -u)" != 0 ] || user=()
export tree copy OMP_NUM_THREADS=1 HOME="$copy/home" TMPDIR="$copy/tmp"
exec unshare "${user[@]}" --mount --pid --net --fork --mount-proc bash -c '
    ip link set lo up
    mount --bind "$tree/.venv" "$copy/.venv"
    mount --rbind "$copy" "$tree"
    cd "$tree" && source tools/setup.sh
    [[ " $*" = *" tests/ascend"* ]] || exec .venv/bin/python -m tools.mutants "$@"
    umbra_ascend_python -m tools.mutants "$@"' mutants "$@"
