#!/usr/bin/env bash
# Checks on this machine what docs/gpu.md says of GPUs. scripts/gpu_acceptance.py has the checks and the arguments.
#
#   bash scripts/gpu_acceptance.sh            half an hour on one GPU
#   bash scripts/gpu_acceptance.sh --quick    some minutes; without a GPU the same code in tiny sizes on CPU
set -euo pipefail
source "$(dirname "$0")/setup.sh"
cd "$REPO_ROOT"
extras=train,retrieval
[ -n "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ] || ! nvidia-smi >/dev/null 2>&1 || extras+=,vllm    # one of yours: as it is
setup_environment "$extras"
exec "$PYTHON" scripts/gpu_acceptance.py "$@"
