#!/usr/bin/env bash
# Checks on this machine what docs/gpu.md says of GPUs. scripts/gpu_acceptance.py has the checks and the arguments.
#
#   bash scripts/gpu_acceptance.sh            half an hour on one GPU
#   bash scripts/gpu_acceptance.sh --quick    some minutes; without a GPU the same code in tiny sizes on CPU
#   bash scripts/gpu_acceptance.sh --only CHECK [CHECK ...]    these checks alone
set -euo pipefail
source "$(dirname "$0")/setup.sh"
answer_help "$@"
cd "$REPO_ROOT"
extras=train,retrieval
if ! is_users_environment && nvidia-smi >/dev/null 2>&1; then    # one of yours: as it is
    extras+=,vllm
    [ "$(uname -m)" != x86_64 ] || extras+=,faiss-gpu    # it is built for no other
fi
setup_environment "$extras"
exec "$PYTHON" scripts/gpu_acceptance.py "$@"
