#!/bin/sh
# Prints "VERSION PATH" of the first CPython that really runs and can make a virtual environment: 3.12, then 3.13,
# then 3.11. Names on PATH may be shims that fail or Pythons without venv, so every candidate is run; the usual folders
# of version managers are searched too. With an argument, only that interpreter is tried. WANTED names other versions, in
# order.
set -u
PROBE='import sys, ssl, ctypes, venv, ensurepip
assert sys.implementation.name == "cpython" and sys.maxsize > 2**32
print("%d.%d" % sys.version_info[:2])'

version_of() { "$1" -c "$PROBE" 2>/dev/null </dev/null; }

if [ $# -gt 0 ] && [ -n "$1" ]; then
    path=$(command -v "$1" 2>/dev/null) || path=$1
    version=$(version_of "$path") || version=""
    case $version in
        3.11|3.12|3.13) echo "$version $path"; exit 0 ;;
        "") echo "PYTHON=$1 does not run, or lacks the modules venv, ensurepip, ssl or ctypes: name a working CPython 3.11, 3.12 or 3.13." >&2 ;;
        *) echo "PYTHON=$1 is Python $version; constraints/ covers 3.11, 3.12 and 3.13, name one of those." >&2 ;;
    esac
    exit 1
fi

candidates() { # of one version, one per line; unmatched patterns stay as text and do not exist
    old_ifs=$IFS; IFS=:
    for folder in $PATH; do
        for name in "python$1" python3 python; do echo "$folder/$name"; done
    done
    IFS=$old_ifs
    for folder in \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1"* \
        "${UV_PYTHON_INSTALL_DIR:-${XDG_DATA_HOME:-$HOME/.local/share}/uv/python}"/cpython-"$1"* \
        "$HOME"/.asdf/installs/python/"$1"* \
        "$HOME"/.local/share/mise/installs/python/"$1"* \
        "$HOME"/.rye/py/cpython@"$1"* \
        "$HOME"/miniconda3 "$HOME"/miniforge3 "$HOME"/mambaforge "$HOME"/anaconda3 /opt/conda /opt/miniconda3 \
        "$HOME"/miniconda3/envs/* "$HOME"/miniforge3/envs/* "$HOME"/mambaforge/envs/* "$HOME"/anaconda3/envs/* \
        /opt/conda/envs/* /opt/python* /opt/python/* /opt/hostedtoolcache/Python/"$1"*/* \
        /opt/homebrew /opt/homebrew/opt/python@"$1" /usr/local/opt/python@"$1" /usr/local /usr \
        /Library/Frameworks/Python.framework/Versions/"$1"; do
        echo "$folder/bin/python$1"
    done
}

for wanted in ${WANTED:-3.12 3.13 3.11}; do
    found=$(candidates "$wanted" | while IFS= read -r path; do
        [ -x "$path" ] && [ "$(version_of "$path")" = "$wanted" ] && echo "$path" && break
    done)
    [ -n "$found" ] && { echo "$wanted $found"; exit 0; }
done
echo "No working Python 3.12, 3.13 or 3.11 found on PATH or in the usual folders: install one, or say make PYTHON=/path/to/python3.12." >&2
exit 1
