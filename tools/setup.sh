# Sourced by infer.sh and test.sh: makes .venv with the pinned requirements, once; later calls cost milliseconds.

umbra_setup() {
    local want have
    want=$(cat requirements.txt tools/setup.sh | sha256sum)
    have=$(cat .venv/umbra-setup 2>/dev/null || true)
    [ "$want" = "$have" ] && return
    exec 9>.setup.lock
    flock 9 # a second call that comes meanwhile waits here, then finds the work done
    have=$(cat .venv/umbra-setup 2>/dev/null || true)
    if [ "$want" != "$have" ]; then
        umbra_python_ok
        echo "setting up .venv (once; PyTorch is the large part) ..." >&2
        .venv/bin/python -c "" 2>/dev/null || python3 -m venv --clear .venv || {
            umbra_apt python3-venv
            python3 -m venv --clear .venv
        }
        .venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
        echo "$want" >.venv/umbra-setup
    fi
    exec 9>&-
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
