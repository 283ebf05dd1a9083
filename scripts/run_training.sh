# shellcheck shell=bash
# The body of train_sft.sh, train_grpo.sh and train_ppo.sh: environment, data, retrieval server, run. Source it,
# then call
#
#     run_training sft|grpo|ppo "$@"
#
# With --doctor among them the run is only checked (python -m verl.doctor), with the settings that it would have.
#
# What it reads from the environment (all optional):
#   BASE_MODEL     a Hugging Face folder or hub name; default: a tiny model that is shipped, data_prep/base_model
#                  (sft: data_prep/base_model_plain). Models with weights below 64 MB get the tiny models' settings.
#   DATA_DIR       a folder with train.parquet and test.parquet (and corpus.jsonl, which is then served), for sft
#                  with sft_train.parquet (and sft_val.parquet, if there is one);
#                  default: the microworld of the seed, made on the spot
#   SEED           seed of the world and of the run; default 0
#   RETRIEVER_URL  a retrieval server that already runs (or several: a,b); default: one is started on DATA_DIR's
#                  corpus and stopped at the end. `retriever.url=...` on the command line does the same.
#   EXPERIMENT_NAME  name of the run and of its folder below verl_checkpoints/
#
# Folders in these variables are relative to where the script is called, paths in overrides to the repository.

source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

stop_all() {    # what this script has started; the run first, which still searches
    local pid _
    trap '' INT TERM HUP USR1    # a second Ctrl-C must not leave the server behind
    for pid in ${TRAINER_PID:-} ${SERVER_PID:-}; do
        kill "$pid" 2>/dev/null || continue
        for _ in $(seq 600); do    # a minute
            kill -0 "$pid" 2>/dev/null || break
            sleep 0.1
        done
        kill -KILL "$pid" 2>/dev/null || true
        wait "$pid" 2>/dev/null || true
    done
}

wait_for_server() {    # log -> RETRIEVER_URL, when the server is ready; fails when it has ended
    while kill -0 "$SERVER_PID" 2>/dev/null; do
        RETRIEVER_URL="$(sed -n 's/^retrieval server on //p' "$1" 2>/dev/null)"    # at first there is no log
        [ -n "$RETRIEVER_URL" ] && "$PYTHON" - "${RETRIEVER_URL%/retrieve}/health" <<'PY' && return 0
import json, sys, urllib.request
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
try:
    sys.exit(json.load(opener.open(sys.argv[1], timeout=5)).get("status") != "ready")
except OSError:
    sys.exit(1)
PY
        sleep 0.1
    done
    return 1
}

start_server() {    # corpus, log -> RETRIEVER_URL
    local corpus="$1" log="$2"
    "$PYTHON" -m search_r1.search.server --host 127.0.0.1 --port 0 \
        --retriever_name bm25 --corpus_path "$corpus" >"$log" 2>&1 &
    SERVER_PID=$!
    if ! wait_for_server "$log"; then
        echo "error: the retrieval server did not start on $corpus. The end of its log ($log):" >&2
        tail -n 5 "$log" >&2
        return 1
    fi
}

absolute() {    # a folder's absolute path; anything else (a name on the hub) as it is
    if [ -d "$1" ]; then (cd -- "$1" >/dev/null && pwd); else echo "$1"; fi
}

quoted() {    # key, value -> key='value' as the configuration's grammar reads any path
    printf "%s='%s'" "$1" "${2//\'/\\\'}"
}

# Settings of the shipped tiny model on the microworld: minutes on two CPU cores.
TINY_SETTINGS=(
    data.train_batch_size=16 data.val_batch_size=512
    data.max_start_length=64 data.max_prompt_length=768 data.max_response_length=32 data.max_obs_length=250
    actor_rollout_ref.rollout.max_num_seqs=128 actor_rollout_ref.rollout.search_delay_steps=2
    actor_rollout_ref.actor.ppo_mini_batch_size=128 actor_rollout_ref.actor.ppo_micro_batch_size=128
    actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28
    actor_rollout_ref.actor.entropy_coeff=0.003 actor_rollout_ref.actor.optim.weight_decay=0
    critic.ppo_micro_batch_size=128
    algorithm.kl_ctrl.kl_coef=0 retriever.topk=2 max_turns=3
    "trainer.val_modes=[sampled,greedy]" trainer.test_freq=40 trainer.save_freq=40
)
TINY_GRPO=(
    actor_rollout_ref.rollout.n_agent=8 reward_model.search_cost=0.05 trainer.total_training_steps=130
    actor_rollout_ref.actor.optim.lr=8e-4 actor_rollout_ref.actor.optim.warmup_style=cosine
    actor_rollout_ref.actor.optim.min_lr_ratio=0.05
)
TINY_SFT=(
    data.train_batch_size=8 data.max_length=768 optim.lr=3e-3 optim.weight_decay=0
    trainer.total_epochs=1 trainer.save_freq=100
)
TINY_PPO=(
    data.train_batch_size=128 actor_rollout_ref.rollout.n_agent=1 trainer.total_training_steps=100
    actor_rollout_ref.actor.optim.lr=1e-3 trainer.critic_warmup=5
    critic.optim.lr=1e-3 critic.optim.weight_decay=0
)

# Settings for any other model: those of Search-R1's scripts.
MODEL_SETTINGS=(
    data.train_batch_size=512 data.val_batch_size=256
    data.max_start_length=2048 data.max_prompt_length=4096 data.max_response_length=500 data.max_obs_length=500
    actor_rollout_ref.model.enable_gradient_checkpointing=true actor_rollout_ref.model.use_remove_padding=true
    actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.ppo_micro_batch_size=64
    actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.285
    actor_rollout_ref.rollout.log_prob_micro_batch_size=128 actor_rollout_ref.ref.log_prob_micro_batch_size=128
    retriever.topk=3 max_turns=2 trainer.total_epochs=15 trainer.total_training_steps=1005
    trainer.test_freq=50 trainer.save_freq=100
)
MODEL_SFT=(
    data.train_batch_size=128 data.max_length=4096 optim.lr=1e-5
    model.enable_gradient_checkpointing=true trainer.total_epochs=2 trainer.save_freq=100
)
MODEL_GRPO=(
    actor_rollout_ref.rollout.n_agent=5 actor_rollout_ref.actor.use_kl_loss=true
    actor_rollout_ref.actor.kl_loss_coef=0.001 actor_rollout_ref.actor.kl_loss_type=low_var_kl
)
MODEL_PPO=(
    critic.optim.lr=1e-5 critic.optim.lr_warmup_steps_ratio=0.015 critic.ppo_micro_batch_size=8
    critic.model.enable_gradient_checkpointing=true critic.model.use_remove_padding=true
    algorithm.kl_ctrl.kl_coef=0.001
)

is_tiny() {    # a model folder whose weights take less than 64 MB
    [ -f "$1/model.safetensors" ] && [ "$(wc -c <"$1/model.safetensors")" -lt 64000000 ]
}

model_label() {    # what a run of this model is called after: its folder, or the run that the folder is of
    local path="$1"
    while [[ "$(basename "$path")" =~ ^(huggingface|actor|worker|global_step_[0-9]+)$ ]]; do
        path="$(dirname "$path")"
    done
    basename "$path"
}

make_world() {    # seed, sft|grpo|ppo -> DATA_DIR with what that needs
    DATA_DIR="data/microworld/seed$1"
    if [ "$2" = sft ]; then
        [ -f "$DATA_DIR/sft_train.parquet" ] || "$PYTHON" -m data_prep.sft_rows --seed "$1" --out "$DATA_DIR"
    elif [ ! -f "$DATA_DIR/corpus.jsonl" ] || [ ! -f "$DATA_DIR/test_3hop.parquet" ]; then
        "$PYTHON" -m data_prep.microworld --seed "$1" --out "$DATA_DIR"
    fi
}

check_rows() {    # names of files that DATA_DIR must hold
    local file
    for file in "$@"; do
        if [ ! -f "$DATA_DIR/$file" ]; then
            echo "error: DATA_DIR=$DATA_DIR holds no $file. Make one with data_prep/squad.py (sft_train.parquet:" \
                "like data_prep/sft_rows.py), or unset DATA_DIR to train on the microworld." >&2
            return 1
        fi
    done
}

start_search() {    # run folder -> RETRIEVER_URL of a server on DATA_DIR's corpus
    if [ ! -f "$DATA_DIR/corpus.jsonl" ]; then
        echo "error: DATA_DIR=$DATA_DIR holds no corpus.jsonl to search. Put one there, or give a running server:" \
            "RETRIEVER_URL=http://host:port/retrieve" >&2
        return 1
    fi
    start_server "$DATA_DIR/corpus.jsonl" "$1/retrieval_server.log"
}

sft_overrides() {    # model -> overrides, one a line
    quoted data.train_files "$DATA_DIR/sft_train.parquet" && echo
    if [ -f "$DATA_DIR/sft_val.parquet" ]; then
        quoted data.val_files "$DATA_DIR/sft_val.parquet" && echo
        echo trainer.test_freq=100
    fi
    quoted model.partial_pretrain "$1" && echo
    echo data.segments_key=segments
}

rl_overrides() {    # model, grpo|ppo -> overrides, one a line
    quoted data.train_files "$DATA_DIR/train.parquet" && echo
    quoted data.val_files "$DATA_DIR/test.parquet" && echo
    [ ! -f "$DATA_DIR/test_3hop.parquet" ] || { quoted data.extra_val_files "$DATA_DIR/test_3hop.parquet" && echo; }
    quoted actor_rollout_ref.model.path "$1" && echo
    quoted critic.model.path "$1" && echo
    if [ "$2" = ppo ]; then echo algorithm.adv_estimator=gae; else echo algorithm.adv_estimator=grpo; fi
}

settings_for() {    # tiny|model, sft|grpo|ppo -> overrides, one a line
    case "$1-$2" in
        tiny-sft) printf '%s\n' "${TINY_SFT[@]}" ;;
        tiny-ppo) printf '%s\n' "${TINY_SETTINGS[@]}" "${TINY_PPO[@]}" ;;
        tiny-grpo) printf '%s\n' "${TINY_SETTINGS[@]}" "${TINY_GRPO[@]}" ;;
        model-sft) printf '%s\n' "${MODEL_SFT[@]}" ;;
        model-ppo) printf '%s\n' "${MODEL_SETTINGS[@]}" "${MODEL_PPO[@]}" ;;
        model-grpo) printf '%s\n' "${MODEL_SETTINGS[@]}" "${MODEL_GRPO[@]}" ;;
    esac
}

megatron_extra() {    # the overrides of a run -> ",megatron" if it needs that
    [[ "$*" != *strategy=megatron* && "$*" != *ppo_megatron_trainer* ]] || echo ,megatron
}

run_training() {
    local kind="$1" needs_server=true dry_run=false argument extras=train,retrieval
    local program=(verl.trainer.main_ppo) doctor=false passed=()
    shift
    for argument in "$@"; do
        if [ "$argument" = --doctor ]; then doctor=true; else passed+=("$argument"); fi
        case "$argument" in
            *retriever.url=* | *do_search=[Ff]alse | *trainer.dry_run=[Tt]rue) needs_server=false ;;
        esac
        [[ "$argument" == *trainer.dry_run=[Tt]rue ]] && dry_run=true needs_server=false    # a plan, without data
    done
    [ -z "${RETRIEVER_URL:-}" ] || needs_server=false

    local model=data_prep/base_model
    if [ "$kind" = sft ]; then
        model=data_prep/base_model_plain program=(verl.trainer.fsdp_sft_trainer) needs_server=false extras=train
    fi
    if $doctor; then
        program=(verl.doctor)
        [ "$kind" != sft ] || program+=(--config-name sft_trainer)
    fi
    set -- ${passed[@]+"${passed[@]}"}    # without --doctor, wherever it stood
    [ -n "${BASE_MODEL:-}" ] && model="$(absolute "$BASE_MODEL")"
    [ -n "${DATA_DIR:-}" ] && DATA_DIR="$(absolute "$DATA_DIR")"
    cd "$REPO_ROOT" || return
    setup_environment "$extras$(megatron_extra "$@")"
    export TOKENIZERS_PARALLELISM=false OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT=0 PYTHONUNBUFFERED=1

    local seed="${SEED:-0}"
    if $dry_run; then
        DATA_DIR="${DATA_DIR:-data/microworld/seed$seed}"
    else
        [ -n "${DATA_DIR:-}" ] || make_world "$seed" "$kind"
        if [ "$kind" = sft ]; then check_rows sft_train.parquet; else check_rows train.parquet test.parquet; fi
    fi

    local data name size=model
    data="$(basename "$(dirname "$DATA_DIR")")-$(basename "$DATA_DIR")"
    name="$(model_label "$model")"
    name="${EXPERIMENT_NAME:-$data-${name#"$data"-}-$kind-seed$seed}"
    local run_dir="verl_checkpoints/$name"
    $dry_run || mkdir -p "$run_dir"
    if [ -z "${BASE_MODEL:-}" ] || is_tiny "$model"; then
        size=tiny
        echo "settings: those of the tiny models"
    fi

    local overrides=(
        "trainer.seed=$seed" "trainer.project_name=search-r1" "$(quoted trainer.experiment_name "$name")"
        "$(quoted trainer.default_local_dir "$run_dir")"
    )
    while IFS= read -r argument; do
        overrides+=("$argument")
    done < <(if [ "$kind" = sft ]; then sft_overrides "$model"; else rl_overrides "$model" "$kind"; fi
        settings_for "$size" "$kind")

    trap stop_all EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    trap 'exit 129' HUP
    trap 'exit 138' USR1
    ! $needs_server || start_search "$run_dir"
    [ "$kind" = sft ] || [ -z "${RETRIEVER_URL:-}" ] || overrides+=("$(quoted retriever.url "$RETRIEVER_URL")")

    # In the background, so that a signal to this script is handled at once and not after the run.
    "$PYTHON" -m "${program[@]}" "${overrides[@]}" "$@" &
    TRAINER_PID=$!
    local status interrupted=true
    # It ends its step, writes a checkpoint and stops; or has ended already.
    trap 'interrupted=true; kill -USR1 "$TRAINER_PID" 2>/dev/null || true' USR1
    while $interrupted; do
        interrupted=false status=0
        wait "$TRAINER_PID" || status=$?
    done
    TRAINER_PID=    # it has ended: its number may be somebody else's by now
    return "$status"
}
