#!/usr/bin/env bash
# Runs the tests that need vLLM, in the environment that is active or in .venv-vllm, which is made once: on a machine
# without an NVIDIA GPU vLLM's CPU build beside our training requirements (3.9 GB, two to three minutes).
#   bash scripts/test_vllm.sh              all of them
#   bash scripts/test_vllm.sh -k stop      everything else goes to pytest as it is
set -euo pipefail
source "$(dirname "$0")/setup.sh"
answer_help "$@"
cd "$REPO_ROOT"
setup_environment test,vllm
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
"$PYTHON" -c 'import vllm; print("vLLM", vllm.__version__)' || {
    echo "error: vLLM can't be imported in $PYTHON; without an active environment, this script makes one." >&2
    exit 1
}
"$PYTHON" -m pytest -q -m vllm --durations=10 "$@"
