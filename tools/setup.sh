# Sourced by infer.sh and test.sh: makes .venv with the pinned requirements and builds the native module, each once;
# later calls cost milliseconds.

umbra_setup() {
    umbra_stale && {
        exec 9>.setup.lock
        flock 9 # a second call that comes meanwhile waits here, then finds the work done
        umbra_stale && umbra_make
        exec 9>&-
    }
    return 0
}

umbra_requirements() { sha256sum requirements.txt tools/setup.sh; }
umbra_sources() { find ops/cpu/csrc -name build -prune -o -type f -print0 | sort -z | xargs -0 sha256sum; }

umbra_stale() {
    [ "$(umbra_requirements)" != "$(cat .venv/umbra-setup 2>/dev/null)" ] ||
        [ "$(umbra_sources)" != "$(cat .venv/umbra-native 2>/dev/null)" ] ||
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
        .venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
        umbra_requirements >.venv/umbra-setup
    fi
    echo "building the native CPU kernels ..." >&2
    local built=.venv/umbra-build
    rm -rf "$built"
    PATH="$PWD/.venv/bin:$PATH" .venv/bin/python -m pip install --quiet --disable-pip-version-check \
        --no-build-isolation --no-deps --no-index --target "$built" ./ops/cpu/csrc
    rm -f ops/cpu/_native*.so
    mv "$built"/_native*.so ops/cpu/
    umbra_sources >.venv/umbra-native
}

umbra_python_ok() {
    command -v python3 >/dev/null || umbra_apt python3
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
        echo "error: $(python3 --version) is too old: Umbra needs Python 3.10 or newer" >&2
        exit 2
    }
}

# Debian packages, where we may install them; otherwise say what to install.
umbra_apt() {
    local sudo=""
    [ "$(id -u)" = 0 ] || sudo="sudo -n"
    echo "installing Debian packages: $*" >&2
    { $sudo apt-get update -qq && $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$@" >/dev/null; } || {
        echo "error: cannot install them here; run as root: apt-get install $*" >&2
        exit 2
    }
}
