#!/bin/sh
# make_venv.sh VENV [PYTHON [EXTRAS]]: makes or updates the virtual environment VENV with this project, editable, and
# what its EXTRAS (test) need, at the versions of constraints/. An environment whose interpreter no longer runs, or is
# another version than asked for, is made anew.
set -eu
cd "$(dirname "$0")/.."
venv=$1
found=$(sh scripts/find_python.sh "${2:-}")
version=${found%% *}
python=${found#* }
has=$("$venv/bin/python" -c 'import sys, pip; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || has=""
case "$has:${2:-}" in
    3.1[123]:) version=$has ;; # any version will do: keep the one that is there
    "$version":*) ;;
    *) echo "making $venv with $python"
       "$python" -m venv --clear "$venv" ;;
esac
echo "installing into $venv (Python $version; a few minutes the first time)"
pip() { "$venv/bin/python" -m pip install -qq --disable-pip-version-check -c "constraints/py$version.txt" "$@"; }
pip setuptools
pip --no-build-isolation -e ".[${3:-test}]"
