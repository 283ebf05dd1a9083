#!/usr/bin/env bash
# Supervised training, before reinforcement learning. With no arguments, on any machine: makes its environment and
# demonstrations of searching in a small world, and teaches the protocol to a shipped tiny model that does not know
# it. The model in the end goes straight into train_grpo.sh or train_ppo.sh.
#
#   bash train_sft.sh                                   demonstrations in the microworld, on CPU, in minutes
#   BASE_MODEL=verl_checkpoints/microworld-seed0-base_model_plain-sft-seed0/huggingface bash train_grpo.sh
#
#   DATA_DIR=data/mine BASE_MODEL=Qwen/Qwen2.5-3B bash train_sft.sh trainer.n_gpus_per_node=8
#       data/mine/sft_train.parquet: a column `segments`; for messages or prompt and response, say which:
#       data.segments_key=null data.multiturn.enable=true, or data.segments_key=null data.prompt_key=question
#
# scripts/run_training.sh says what else it reads from the environment.
set -euo pipefail
source "$(dirname "$0")/scripts/run_training.sh"
run_training sft "$@"
