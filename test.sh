#!/usr/bin/env bash
# Sets the machine up once, then runs every check and test:  bash test.sh [pytest arguments]
# The arguments are for the main tests. tests/ascend, which needs a Python of its own, always runs whole, and alone with
#     bash test.sh ascend [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source tools/setup.sh
umbra_setup
umbra_setup_ascend
case "${1:-}" in
ascend)
    umbra_ascend_python -m pytest tests/ascend "${@:2}"
    exit
    ;;
esac
for tool in aarch64-linux-gnu-g++ qemu-aarch64; do
    command -v "$tool" >/dev/null || {
        (umbra_apt --no-install-recommends g++-aarch64-linux-gnu qemu-user) || echo "the ARM tests will be skipped" >&2
        break
    }
done

# tests/ops/cpu/test_numa.py boots a kernel on a made-up machine of four NUMA nodes; where it cannot be had the test skips.
umbra_numa() {
    local to=.venv/umbra-kernel kernel
    command -v qemu-system-x86_64 >/dev/null && compgen -G "$to/vmlinuz-*" >/dev/null && return
    umbra_apt --no-install-recommends qemu-system-x86 # and the package lists are fresh for what follows
    kernel=$(apt-cache depends linux-image-cloud-amd64 | awk '/Depends: linux-image/ { print $2; exit }')
    mkdir -p "$to" && cd "$to" && apt-get download -qq -o APT::Sandbox::User=root "$kernel" &&
        dpkg-deb --fsys-tarfile "$kernel"_*.deb | tar -x --wildcards --strip-components 2 './boot/vmlinuz-*' &&
        rm "$kernel"_*.deb
}
[ "$(uname -m)" != x86_64 ] || (umbra_numa) || echo "no kernel for the NUMA test: it will be skipped" >&2

echo "== ruff"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
echo "== mypy"
.venv/bin/mypy
echo "== pytest"
status=0
.venv/bin/python -m pytest "$@" || status=$?
echo "== pytest on a fake CANN"
umbra_ascend_python -m pytest tests/ascend || status=$?
exit "$status"
