#!/usr/bin/env bash
# Builds the custom operators for Ascend's vector cores, and the torch extension that calls them. --help tells more.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

KNOWN="ascend910b ascend910_93"
BUILD=ops/ascend/vector_core/build # git ignores it; ops/ascend/vector_core/__init__.py looks here

usage() {
    cat <<END
bash ops/ascend/vector_core/build.sh [SOC ...]     SOC: $KNOWN (default: all of them)

Needs CANN with its compiler (source its set_env.sh first), the python3 that CANN was installed for, cmake, g++, and a
Python with torch and torch_npu: .venv/bin/python, or the one in the variable PYTHON. No root. Writes only to $BUILD:
    opp/vendors/umbra     the operators; Umbra's launcher tells CANN of them (ASCEND_CUSTOM_OPP_PATH)
    umbra_ascendc.so      torch.ops.umbra.* on the NPU
Its presence is what ascend_config.decode_gemv: auto goes by. Delete $BUILD to undo everything.
END
}

fail() {
    echo "error: $*" >&2
    exit 2
}

case "${1:-}" in -h | --help) usage && exit ;; esac
[ $# -gt 0 ] || read -ra all <<<"$KNOWN"
socs=("${@:-${all[@]}}")
for soc in "${socs[@]}"; do
    [[ " $KNOWN " == *" $soc "* ]] || fail "SOC $soc is unknown: choose from $KNOWN"
done
[ -n "${ASCEND_HOME_PATH:-}" ] || fail "ASCEND_HOME_PATH is not set: source set_env.sh of the CANN toolkit first"
templates=$ASCEND_HOME_PATH/compiler/tikcpp/ascendc_kernel_cmake
[ -d "$templates" ] || fail "no $templates: install the CANN toolkit, or point ASCEND_HOME_PATH at it"
python=${PYTHON:-.venv/bin/python}
cmake=$(command -v cmake || echo .venv/bin/cmake) # locked by tools/supply
for tool in "$python" "$cmake" g++ make python3; do
    command -v "$tool" >/dev/null || fail "no $tool: install it, or run bash infer.sh once, which makes .venv"
done

rm -rf "$BUILD"
units=$(IFS=';' && echo "${socs[*]}")
"$cmake" -S ops/ascend/vector_core -B "$BUILD/package" -G "Unix Makefiles" -DCMAKE_BUILD_TYPE=Release \
    -DASCEND_COMPUTE_UNIT="$units" -DASCEND_CANN_PACKAGE_PATH="$ASCEND_HOME_PATH"
"$cmake" --build "$BUILD/package" --target binary --parallel
"$cmake" --build "$BUILD/package" --target package
installers=("$BUILD"/package/custom_opp_*.run)
[ -f "${installers[0]}" ] || fail "CANN made no package in $BUILD/package: see above"
bash "${installers[0]}" --quiet --install-path="$PWD/$BUILD/opp"
[ -f "$BUILD/opp/vendors/umbra/op_api/lib/libcust_opapi.so" ] || fail "the package was not installed: see above"
"$python" -m umbra.ops.ascend.vector_core.extension "$BUILD/umbra_ascendc.so" # last: it says that all is there
echo "built for ${socs[*]}: $BUILD"
