#!/usr/bin/env bash
# PPO with a critic and GAE; otherwise as train_grpo.sh.
#
#   bash train_ppo.sh
#   DATA_DIR=data/squad BASE_MODEL=Qwen/Qwen2.5-3B bash train_ppo.sh trainer.n_gpus_per_node=8
set -euo pipefail
source "$(dirname "$0")/scripts/run_training.sh"
run_training ppo "$@"
