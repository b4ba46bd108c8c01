#!/bin/sh
# Prints the newest Python from 3.13 down to 3.11 that works, or the one named by the first argument if it does.
# "Works" is tried, not read from a name: pyenv puts a python3.13 on the PATH that only says "command not found",
# Debian ships a venv module without ensurepip, and hand-built Pythons may lack ssl or ctypes.
# Newest first because Python 3.11 gets jax 0.10.2 and 3.12 gets 0.12, which is 1.35 times faster on CPU.

works() {
    "$1" -c 'import sys, venv, ensurepip, ssl, ctypes; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null
}

if [ -n "${1:-}" ]; then
    if works "$1"; then
        "$1" -c 'import sys; print(sys.executable)'
        exit 0
    fi
    echo "PYTHON=$1 does not work: it must run, be 3.11 to 3.13, and import venv, ensurepip, ssl and ctypes." >&2
    exit 1
fi

for version in 3.13 3.12 3.11; do
    # Versions that pyenv holds without having them on the PATH count too.
    for candidate in "python$version" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python; do
        if works "$candidate"; then
            "$candidate" -c 'import sys; print(sys.executable)'
            exit 0
        fi
    done
done
if works python3; then # conda environments have no python3.X of every version
    python3 -c 'import sys; print(sys.executable)'
    exit 0
fi
echo "No working Python 3.11, 3.12 or 3.13 found (with venv, ensurepip, ssl and ctypes). Name one: make PYTHON=/path/to/python" >&2
exit 1
