#!/bin/sh
# make_venv.sh FOLDER [PYTHON]: creates the virtual environment, unless the one there runs and is of that Python.
# FOLDER/.interpreter is touched only when something was made, so that make reinstalls exactly then.
set -e
folder=$1
wanted=${2:-}
stamp=$folder/.interpreter

if [ -f "$stamp" ] && "$folder/bin/python" -c 'import pip' 2>/dev/null; then
    [ -z "$wanted" ] && exit 0
    found=$(sh "$(dirname "$0")/find_python.sh" "$wanted")
    [ "$found" = "$(cat "$stamp")" ] && exit 0
fi
found=$(sh "$(dirname "$0")/find_python.sh" "$wanted")
echo "Creating $folder with $("$found" --version) ($found)"
rm -rf "$folder"
"$found" -m venv "$folder"
echo "$found" >"$stamp"
