# Sourced by infer.sh, serve.sh and test.sh: makes .venv with the locked packages that running needs, and builds the native
# module, each once; later calls cost milliseconds. test.sh adds what tests and checks need (umbra_setup_dev).
#
# Packages come from the lock files alone, and as wheels: pip checks the hash of each, and runs no package's own build.
umbra_locks=tools/supply/locks

umbra_setup() {
    umbra_stale && {
        exec 9>.setup.lock
        flock 9 # a second call at the same time waits here, then finds the work done
        umbra_stale && umbra_make
        exec 9>&-
    }
    return 0
}

umbra_requirements() { sha256sum "$umbra_locks"/{main,torch-cpu,torch-cuda}.lock tools/setup.sh; }
umbra_sources() { find ops/cpu/csrc -name build -prune -o -type f -print0 | sort -z | xargs -0 sha256sum; }

umbra_stale() {
    [ "$(umbra_requirements)" != "$(cat .venv/umbra-setup 2>/dev/null)" ] ||
        [ "$(umbra_sources)" != "$(cat ops/cpu/.built 2>/dev/null)" ] ||
        ! compgen -G "ops/cpu/_native*.so" >/dev/null
}

umbra_make() {
    umbra_python_ok
    command -v g++ >/dev/null || umbra_apt g++
    if [ "$(umbra_requirements)" != "$(cat .venv/umbra-setup 2>/dev/null)" ]; then
        echo "setting up .venv (once; PyTorch is the large part) ..." >&2
        .venv/bin/python -c "" 2>/dev/null || python3 -m venv --clear .venv || {
            umbra_apt python3-venv
            python3 -m venv --clear .venv
        }
        umbra_install .venv main >/dev/null & # both unpack on one core each
        local main=$!
        umbra_install_torch
        wait "$main"
        pwd >"$(umbra_site .venv)/umbra.pth" # import umbra
        printf '#!%s\nfrom umbra.cli import main\n\nmain()\n' "$PWD/.venv/bin/python" >.venv/bin/umbra
        chmod +x .venv/bin/umbra
        umbra_requirements >.venv/umbra-setup
    fi
    echo "building the native CPU kernels ..." >&2
    rm -f ops/cpu/_native*.so
    umbra_build ops/cpu/csrc build/native "$PWD/ops/cpu"
    umbra_sources >ops/cpu/.built
}

# Builds the native module:  umbra_build SOURCES BUILD_FOLDER FOLDER_FOR_THE_MODULE
umbra_build() {
    local cmake=.venv/bin/cmake python=$PWD/.venv/bin/python
    mkdir -p "$2"
    {
        "$cmake" -S "$1" -B "$2" -G Ninja -DCMAKE_MAKE_PROGRAM="$PWD/.venv/bin/ninja" -DCMAKE_BUILD_TYPE=Release \
            -DPython_EXECUTABLE="$python" -Dpybind11_DIR="$("$python" -m pybind11 --cmakedir)" &&
            (set -o pipefail && "$cmake" --build "$2" | umbra_steps) && "$cmake" --install "$2" --prefix "$3"
    } 7>&2 >"$2.log" 2>&1 || {
        cat "$2.log" >&2
        echo "error: the native module does not build" >&2
        exit 2
    }
}

# Passes on what ninja says, and shows on descriptor 7 how far it is: on a terminal in one line, elsewhere at each quarter.
umbra_steps() {
    local line said=0
    while IFS= read -r line; do
        printf '%s\n' "$line"
        [[ $line =~ ^\[([0-9]+)/([0-9]+)\] ]] || continue
        if [ -t 7 ]; then
            printf '\rbuilding: %d of %d ' "${BASH_REMATCH[@]:1:2}" >&7
        elif ((4 * BASH_REMATCH[1] / BASH_REMATCH[2] > said)); then
            said=$((4 * BASH_REMATCH[1] / BASH_REMATCH[2]))
            printf 'building: %d of %d\n' "${BASH_REMATCH[@]:1:2}" >&7
        fi
    done
    [ ! -t 7 ] || echo >&7
}

# Adds what tests, checks and benchmarks need to .venv.
umbra_setup_dev() {
    umbra_setup
    exec 9>.setup.lock
    flock 9
    if [ "$(cat "$umbra_locks/dev.lock" .venv/umbra-setup | sha256sum)" != "$(cat .venv/umbra-dev 2>/dev/null)" ]; then
        echo "adding what tests need to .venv (once) ..." >&2
        umbra_install .venv dev
        cat "$umbra_locks/dev.lock" .venv/umbra-setup | sha256sum >.venv/umbra-dev
    fi
    exec 9>&-
}

# PyTorch for CPUs alone, where pip's own settings offer it; else the index's, with the CUDA libraries that it needs.
umbra_install_torch() { umbra_install .venv torch-cpu 2>/dev/null || umbra_install .venv torch-cuda; }

# Installs exactly what the lock file NAME has for this Python and processor:  umbra_install VENV NAME
# On a terminal pip shows how far it is.
umbra_install() {
    local shown=--quiet
    [ ! -t 1 ] || shown=--progress-bar=on
    "$1/bin/python" -m pip install "$shown" --disable-pip-version-check --no-deps --require-hashes --only-binary :all: \
        -r "$umbra_locks/$2.lock"
}

# .venv/NAME: what group NAME of pyproject.toml adds to .venv for tests/NAME, with everything else taken from .venv.
umbra_setup_beside() {
    local name=$1 venv=.venv/$1 requirements
    requirements=$(sha256sum "$umbra_locks/$name.lock" .venv/umbra-setup tools/setup.sh)
    exec 9>.setup.lock
    flock 9
    if [ "$requirements" != "$(cat "$venv/umbra-setup" 2>/dev/null)" ]; then
        echo "setting up $venv (once) ..." >&2
        .venv/bin/python -m venv --clear "$venv"
        umbra_install "$venv" "$name" || {
            echo "error: tests/$name cannot run: group $name of pyproject.toml has nothing for $(.venv/bin/python -V) on" \
                "$(uname -m), see above" >&2
            exit 2
        }
        umbra_site .venv >"$(umbra_site "$venv")/umbra.pth"
        echo "$requirements" >"$venv/umbra-setup"
    fi
    exec 9>&-
}

umbra_site() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])'; }

# torch_npu on a fake CANN. It has a folder of its own, because where torch_npu is installed a plain `import torch` fails
# on a machine without CANN.
umbra_setup_ascend() {
    umbra_setup_beside ascend
    flock .setup.lock .venv/ascend/bin/python -m tests.fakes.cann.generate .venv/ascend/fake_cann
}

# Python with torch_npu and the fake CANN, also where there is a real one:  umbra_ascend_python -m pytest tests/ascend
umbra_ascend_python() {
    env -u ASCEND_HOME_PATH -u ASCEND_OPP_PATH TORCH_DEVICE_BACKEND_AUTOLOAD=0 \
        ASCEND_CUSTOM_OPP_PATH="$PWD/.venv/ascend/fake_cann/custom_opp" \
        LD_LIBRARY_PATH="$PWD/.venv/ascend/fake_cann${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" .venv/ascend/bin/python "$@"
}

umbra_python_ok() {
    command -v python3 >/dev/null || umbra_apt python3
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
        echo "error: $(python3 --version) is too old: Umbra needs Python 3.10 or newer" >&2
        exit 2
    }
}

# Installs Debian packages where this user may, and otherwise says which are missing. A second call at the same time waits.
umbra_apt() {
    local sudo=""
    [ "$(id -u)" = 0 ] || sudo="sudo -n"
    exec 8>.apt.lock
    flock 8
    echo "installing Debian packages: $*" >&2
    { $sudo apt-get update -qq && $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$@" >/dev/null; } || {
        echo "error: cannot install them here; run as root: apt-get install $*" >&2
        exit 2
    }
    exec 8>&-
}
