#!/usr/bin/env bash
# Brings what a job needs, on a machine with a network such as a login node, and checks what can be known there:
#
#   search-r1 prepare [--out FILE] [the job's arguments]      or: bash scripts/prepare_job.sh ...
#
# Give it the arguments and variables of the job (scripts/slurm/train.sbatch: TRAIN_COMMAND, RETRIEVAL_ARGS,
# RETRIEVAL_ENV, BASE_MODEL, DATA_DIR, SEED, JOB_SETUP). The environment is made; models, critic, teacher, encoder
# and reranker come from the hub into its cache, rows, corpus and index to their paths; then the doctor looks at what
# a login node can know (--doctor --login). FILE (default: prepared.sh) lets the job run without a network: submit it
# with JOB_SETUP=FILE. A job without SLURM: source FILE, then the same command.
set -euo pipefail
# shellcheck source=run_training.sh
source "$(dirname "${BASH_SOURCE[0]}")/run_training.sh"
answer_help "$@"

out=prepared.sh arguments=()
while [ $# -gt 0 ]; do
    case "$1" in
        --out) out="${2:?"found --out without a file; expected --out FILE"}" && shift ;;
        --out=*) out="${1#--out=}" ;;
        *) arguments+=("$1") ;;
    esac
    shift
done
case "$out" in /*) ;; *) out="$PWD/$out" ;; esac

if [ -n "${JOB_SETUP:-}" ]; then
    [ -f "$JOB_SETUP" ] || { echo "error: JOB_SETUP=$JOB_SETUP is no file." >&2 && exit 2; }
    set +u -a    # as the job reads it
    # shellcheck disable=SC1090    # the user's
    if [ "$JOB_SETUP" -ef "$out" ]; then unset JOB_SETUP; else source "$JOB_SETUP"; fi
    set -u +a
fi
# A login node has no GPU, and the job has: it needs vLLM's build for GPUs.
[[ " ${arguments[*]-} " == *" trainer.device=cpu "* ]] || export VLLM_BUILD=gpu
read -ra train <<<"${TRAIN_COMMAND:-bash train_grpo.sh}"
if [ "$(basename "${DATA_DIR:-}")" = nq_search ] && ! rows_file train >/dev/null; then
    setup_environment train
    "$PYTHON" -m data_prep.qa_search --local_dir "$DATA_DIR"
fi

case "${train[*]}" in
    *train_*.sh* | *search-r1\ train* | *search-r1\ ppo* | *search-r1\ sft*)
        "${train[@]}" --prepare="$out" ${arguments[@]+"${arguments[@]}"} ;;
    *)
        setup_environment "train,retrieval$(more_extras "${train[@]}" ${arguments[@]+"${arguments[@]}"})"
        program=(data_prep.job --out "$out") given=()
        case "${train[*]}" in
            *verl.trainer.* | *verl.rl* | *search-r1\ rl*)    # settings may stand in TRAIN_COMMAND, too
                [[ "${train[*]}" != *fsdp_sft_trainer* ]] || program+=(--config-name sft_trainer)
                for number in "${!train[@]}"; do
                    [[ ! "${train[number]}" =~ ^(verl\.trainer\..*|verl\.rl|rl)$ ]] || given=("${train[@]:number + 1}")
                done
                given+=(${arguments[@]+"${arguments[@]}"}) ;;
            *)    # evaluation, synthesis, a program of the user: models are known by the flags that name them
                words=("${train[@]:1}" ${arguments[@]+"${arguments[@]}"})
                for number in "${!words[@]}"; do
                    case "${words[number]}" in
                        --model | --tokenizer | --encoder) program+=("--model=${words[number]}=${words[number + 1]-}") ;;
                        --model=* | --tokenizer=* | --encoder=*) program+=("--model=${words[number]}") ;;
                    esac
                done ;;
        esac
        "$PYTHON" -m "${program[@]}" ${given[@]+"${given[@]}"} ;;
esac
echo "prepared. Submit the job with JOB_SETUP=$out and the same variables and arguments."
