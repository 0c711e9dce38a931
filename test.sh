#!/usr/bin/env bash
# Sets this machine up once, then runs the checks (ruff, clang-format, mypy) and the tests on all its cores:
#     bash test.sh [pytest arguments]              everything but the thorough tests; the arguments are for the main tests
#     bash test.sh --quick [pytest arguments]      the inner loop: without tests that are marked slow and without tests/ascend
#     bash test.sh thorough [pytest arguments]     only the thorough tests: programs under sanitizers, more ranks, variants
#     bash test.sh ascend [pytest arguments]       only tests/ascend, with its thorough tests, on a fake CANN
#     bash test.sh fuzz [SECONDS]                  only tests/fuzz: all its targets share the time, 60 seconds by default
# The name of each test is printed when it ends, and the stack of a test that takes longer than five minutes. `-n 0` runs
# the tests in one process. The checks, tests/ascend, those of the GPU's kernels, and tests that mostly wait run beside the
# main tests; each of their lines begins with the name of the part.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source tools/setup.sh
workers=(-n "$(nproc)" --maxprocesses 4 --dist worksteal)
export OMP_NUM_THREADS=1      # PyTorch's threads wait without sleeping; nproc would read this too
unset PYTHONDONTWRITEBYTECODE # hundreds of processes would compile the same files

umbra_checks() {
    echo "== ruff"
    .venv/bin/ruff check .
    .venv/bin/ruff format --check .
    echo "== clang-format"
    git ls-files '*.cpp' '*.h' '*.c' | xargs .venv/bin/clang-format --dry-run --Werror
    echo "== mypy"
    .venv/bin/mypy
}

# Tests that wait for most of their time, in one process: a worker of the main tests would wait with them.
umbra_test_beside() {
    echo "== pytest, what takes long and does little"
    # shellcheck disable=SC2046 # names of tests have no spaces. To read all tests for the few of this kind takes long
    [ $# -gt 0 ] || set -- $(grep -rl --include='test_*.py' 'mark\.beside' tests)
    .venv/bin/python -m pytest -n 0 -m "beside and not thorough" "$@" || [ $? = 5 ] # 5: the arguments select none of them
}

umbra_test_ascend() {
    umbra_setup_ascend
    echo "== pytest on a fake CANN"
    umbra_ascend_python -m pytest "${workers[@]}" tests/ascend "$@"
}

# Triton's kernels, in its interpreter and by its compiler, which need no GPU. Where its one wheel cannot be had, for
# Linux on x86-64, these tests are not run.
umbra_test_cuda() {
    if (umbra_setup_beside cuda) && .venv/cuda/bin/python -c "import triton"; then
        echo "== pytest on Triton's kernels"
        .venv/cuda/bin/python -m pytest -n 0 tests/ops/cuda/kernels "$@"
    else
        echo "tests of Triton's kernels are left out" >&2
    fi
}

# What tests of Ascend C, and thorough ones of native fuzzing, need; a test whose tools cannot be had is skipped.
umbra_clang() {
    [ -n "$(compgen -c clang++)" ] || (umbra_apt --no-install-recommends clang-19 libclang-rt-19-dev) ||
        echo "tests that need clang will be skipped" >&2
}

# What only thorough tests need: ARM kernels are emulated, and tests/ops/cpu/test_numa.py boots a kernel on a simulated
# machine of four NUMA nodes.
umbra_emulators() {
    local tool to=.venv/umbra-kernel kernel
    for tool in aarch64-linux-gnu-g++ qemu-aarch64; do
        command -v "$tool" >/dev/null || {
            (umbra_apt --no-install-recommends g++-aarch64-linux-gnu qemu-user) || echo "the ARM tests will be skipped" >&2
            break
        }
    done
    [ "$(uname -m)" = x86_64 ] || return 0
    command -v qemu-system-x86_64 >/dev/null && compgen -G "$to/vmlinuz-*" >/dev/null && return 0
    (
        umbra_apt --no-install-recommends qemu-system-x86 # and the package lists are fresh for what follows
        kernel=$(apt-cache depends linux-image-cloud-amd64 | awk '/Depends: linux-image/ { print $2; exit }')
        mkdir -p "$to" && cd "$to" && apt-get download -qq -o APT::Sandbox::User=root "$kernel" &&
            dpkg-deb --fsys-tarfile "$kernel"_*.deb | tar -x --wildcards --strip-components 2 './boot/vmlinuz-*' &&
            rm "$kernel"_*.deb
    ) || echo "no kernel for the NUMA test: it will be skipped" >&2
}

case "${1:-}" in
--quick)
    umbra_setup_dev
    umbra_checks
    echo "== pytest, the quick tests"
    .venv/bin/python -m pytest "${workers[@]}" -m "not slow" "${@:2}"
    exit
    ;;
thorough)
    { umbra_clang && umbra_emulators; } &
    umbra_setup_dev
    wait $!
    status=0
    .venv/bin/python -m pytest "${workers[@]}" -m "thorough or hypothesis" --hypothesis-profile thorough "${@:2}" || status=1
    [ $# -gt 1 ] || umbra_test_ascend -m thorough || status=1
    [ $# -gt 1 ] || umbra_test_cuda -m thorough || status=1
    exit "$status"
    ;;
fuzz)
    umbra_setup_dev
    python=.venv/fuzz/bin/python
    (umbra_setup_beside fuzz) || python=.venv/bin/python # without atheris inputs are changed at random
    "$python" -m tests.fuzz --seconds "${2:-60}"
    exit
    ;;
ascend)
    umbra_setup_dev
    umbra_test_ascend "${@:2}"
    exit
    ;;
esac
output=$(mktemp -d) # what ran beside, to be shown again where it failed
trap 'rm -r "$output"' EXIT
umbra_clang & # as it waits for downloads most of the time
clang=$!
umbra_setup_dev
umbra_checks 2>&1 | tee "$output/checks" | sed -u 's/^/checks: /' &
checks=$!
umbra_test_ascend -m "not thorough" 2>&1 | tee "$output/ascend" | sed -u 's/^/ascend: /' &
ascend=$!
umbra_test_cuda -m "not thorough" 2>&1 | tee "$output/cuda" | sed -u 's/^/cuda: /' &
cuda=$!
umbra_test_beside "$@" 2>&1 | tee "$output/beside" | sed -u 's/^/beside: /' &
beside=$!
trap 'trap - TERM; kill 0' INT TERM # or what runs beside would go on
status=0 failed=()
wait "$clang"
echo "== pytest"
.venv/bin/python -m pytest "${workers[@]}" -m "not beside and not thorough" "$@" || status=$?
wait "$beside" || failed+=(beside)
[ "$status" != 5 ] || ! grep -q " passed" "$output/beside" || status=0 # all that the arguments select ran beside
wait "$ascend" || failed+=(ascend)
wait "$cuda" || failed+=(cuda)
wait "$checks" || failed+=(checks)
for part in "${failed[@]}"; do
    echo "== $part failed; its last lines:"
    tail -n 30 "$output/$part"
    status=1
done
exit "$status"
