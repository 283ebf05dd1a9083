#!/usr/bin/env bash
# GRPO with a search engine. With no arguments, on any machine: makes its environment, a small world and its
# search server, and trains the shipped tiny model on it.
#
#   bash train_grpo.sh                                  the microworld, on CPU, in minutes
#   SEED=1 bash train_grpo.sh                           another world, another run
#   bash train_grpo.sh --config configs/mixture.yaml    searching, sums and SQL at once, on CPU
#   bash train_grpo.sh --config configs/hops.yaml       goes on with questions of three hops, on CPU
#   DATA_DIR=data/squad BASE_MODEL=Qwen/Qwen2.5-3B bash train_grpo.sh trainer.n_gpus_per_node=8
#   bash train_grpo.sh actor_rollout_ref.actor.optim.lr=1e-4     any override of the configuration
#   BASE_MODEL=<folder that train_sft.sh names at its end> bash train_grpo.sh     after supervised training
#
# scripts/run_training.sh says what else it reads from the environment.
set -euo pipefail
source "$(dirname "$0")/scripts/run_training.sh"
run_training grpo "$@"
