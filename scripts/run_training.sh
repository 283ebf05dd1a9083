# shellcheck shell=bash
# The body of train_sft.sh, train_grpo.sh and train_ppo.sh: environment, data, retrieval server, run. Source it,
# then call
#
#     run_training sft|grpo|ppo "$@"
#
# `usage` says what it takes and reads. configs/mixture.yaml brings data of its own (data_prep.mixture) and a
# supervised start on it, made once, with the settings of configs/mixture_sft.yaml. configs/hops.yaml brings data of its
# own (data_prep.hops) and goes on from the run that this script makes without arguments, which is made first where it
# is not there yet.
#
# All paths of the caller (in these variables, in overrides, in files of settings) are relative to where the script is
# called. What the script makes itself is in the repository: data/, verl_checkpoints/.

source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

# LD_PRELOAD (another NCCL, say) is for the training processes, to which Ray carries it on all nodes: servers, Ray's
# daemons and what makes the data start without it.
WITH_PRELOAD=()
[ -z "${LD_PRELOAD:-}" ] || WITH_PRELOAD=(env "LD_PRELOAD=$LD_PRELOAD")
unset LD_PRELOAD

RUN_DIR='' EMPTY_RUN_DIR=''    # the run's folder once it is made; the same if it is to go where nothing is in it

stop_all() {    # what this script has started, the run first, which still searches; and the folder if nothing is in it
    local pid _
    trap '' INT TERM HUP USR1    # a second Ctrl-C must not leave the server behind
    for pid in ${TICKER_PID:-} ${TRAINER_PID:-} ${SERVER_PID:-}; do
        kill "$pid" 2>/dev/null || continue
        for _ in $(seq 600); do    # a minute
            kill -0 "$pid" 2>/dev/null || break
            sleep 0.1
        done
        kill -KILL "$pid" 2>/dev/null || true
        wait "$pid" 2>/dev/null || true
    done
    if [ -n "$EMPTY_RUN_DIR" ]; then
        [ -n "$(find "$EMPTY_RUN_DIR" -mindepth 1 ! -name run.lock ! -name retrieval_server.log 2>/dev/null)" ] ||
            rm -f "$EMPTY_RUN_DIR"/{retrieval_server.log,run.lock}
        rmdir "$EMPTY_RUN_DIR" 2>/dev/null || true
    fi
}

end_early() {    # name of the signal -> the end of a script whose run has not begun, with a line and a status
    EMPTY_RUN_DIR="$RUN_DIR"
    case "$1" in
        INT) echo "interrupted: no step of this run was begun" >&2 && exit 130 ;;
        USR1) echo "stopped: asked to stop before the first step; the same command begins again" >&2 && exit 3 ;;
    esac
}

end_at_once() {    # for a second Ctrl-C
    echo "interrupted: the run is ended at once; the same command goes on from its last checkpoint" >&2
    exit 130
}

wait_for_server() {    # log, its process -> RETRIEVER_URL, when the server is ready; fails when it has ended
    while kill -0 "$2" 2>/dev/null; do
        RETRIEVER_URL="$(sed -n 's/^retrieval server on //p' "$1" 2>/dev/null)"    # at first there is no log
        [ -n "$RETRIEVER_URL" ] && "$PYTHON" - "${RETRIEVER_URL%/retrieve}/health" <<'PY' && return 0
import json, sys, time, urllib.request
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
for _ in range(20):  # two seconds: a process that loads takes its core from the server
    try:
        if json.load(opener.open(sys.argv[1], timeout=5)).get("status") == "ready":
            sys.exit(0)
    except OSError:
        pass
    time.sleep(0.1)
sys.exit(1)
PY
        sleep 0.1
    done
    return 1
}

start_server() {    # corpus, log -> RETRIEVER_URL
    local corpus="$1" log="$2"
    # In a session of its own, where there are such: a Ctrl-C is for the run, which still searches. It ends with this
    # script also when that is killed (an old setpriv, or busybox's, can't do that).
    # shellcheck disable=SC2046  # words to split
    $(command -v setsid || true) $(setpriv --pdeathsig TERM true 2>/dev/null && echo setpriv --pdeathsig TERM) "$PYTHON" \
        -m search_r1.search.server --host 127.0.0.1 --port 0 --retriever_name bm25 --corpus_path "$corpus" >"$log" 2>&1 &
    SERVER_PID=$!
    if ! announced "starting a search server on $corpus" wait_for_server "$log" "$SERVER_PID"; then
        echo "error: the retrieval server did not start on $corpus. The end of its log ($log):" >&2
        tail -n 5 "$log" >&2
        return 2
    fi
    export RETRIEVER_URL    # agents of one's own ask there, too
}

absolute() {    # a folder's absolute path; anything else (a name on the hub) as it is
    if [ -d "$1" ]; then (cd -- "$1" >/dev/null && pwd); else echo "$1"; fi
}

quoted() {    # key, value -> key='value' as the configuration's grammar reads any path
    printf "%s='%s'" "$1" "${2//\'/\\\'}"
}

is_tiny() {    # a model folder whose weights take less than 64 MB
    [ -f "$1/model.safetensors" ] && [ "$(wc -c <"$1/model.safetensors")" -lt 64000000 ]
}

model_label() {    # what a run of this model is called after: its name, its folder, or the run that the folder is of
    local path="$1"
    while [[ "$(basename "$path")" =~ ^(huggingface|actor|worker|global_step_[0-9]+)$ ]]; do
        path="$(dirname "$path")"
    done
    # The hub's cache: models--Qwen--Qwen2.5-3B/snapshots/<hash>.
    [ "$(basename "$(dirname "$path")")" != snapshots ] || path="$(dirname "$(dirname "$path")")"
    path="$(basename "$path")"
    [[ "$path" != models--* ]] || path="${path##*--}"
    echo "$path"
}

file_label() {    # a file of settings -> what a run is called after it: agent for configs/agent.yaml
    local name
    name="$(basename -- "$1")"
    name="${name%.yaml}" name="${name%.yml}"
    echo "${name%.toml}"
}

overrides_label() {    # overrides -> "" or "-adv_estimator-rloo": those that decide what a run learns are in its name
    local argument key label='' is_file=false
    for argument in "$@"; do
        if $is_file; then
            label+="-$(file_label "$argument")" is_file=false
            continue
        fi
        argument="${argument#+}" argument="${argument#+}"
        key="${argument%%=*}"
        case "$key" in
            @) is_file=true ;;
            @*) label+="-$(file_label "${argument#@}")" ;;
            recipe) label+="-${argument#*=}" ;;
            algorithm.* | reward_model.* | custom_reward_function.* | prompt_selection.* | do_search | max_turns | \
                data.train_files | data.train_data_num | data.mixture | environment.* | \
                actor_rollout_ref.rollout.n_agent | actor_rollout_ref.rollout.placement | trainer.async_training.* | \
                actor_rollout_ref.model.* | actor_rollout_ref.actor.policy_loss.* | \
                actor_rollout_ref.actor.*kl_loss*)
                [ "$argument" = "$key" ] || label+="-${key##*.}-$(basename -- "${argument#*=}")"
                ;;
        esac
    done
    label="${label//[^A-Za-z0-9._-]/}"
    echo "${label:0:120}"
}

config_label() {    # file of --config, the recipe without it, label of the data -> "" or "-agent", a part of a run's name
    local label
    [ -n "$1" ] || return 0
    label="$(file_label "$1")"
    [[ "$1" -ef "$REPO_ROOT/$2" || "$3" == "$label"-* ]] || echo "-${label//[^A-Za-z0-9._-]/}"
}

make_world() {    # seed, sft|grpo|ppo, microworld|mixture|hops -> what that needs in DATA_DIR
    if [ "$3" != microworld ]; then
        [ -f "$DATA_DIR/settings.yaml" ] || "$PYTHON" -m "data_prep.$3" --seed "$1" --out "$DATA_DIR"
    elif [ "$2" = sft ]; then
        [ -f "$DATA_DIR/sft_train.parquet" ] || "$PYTHON" -m data_prep.sft_rows --seed "$1" --out "$DATA_DIR"
    elif [ ! -f "$DATA_DIR/corpus.jsonl" ] || [ ! -f "$DATA_DIR/test_3hop.parquet" ]; then
        "$PYTHON" -m data_prep.microworld --seed "$1" --out "$DATA_DIR"
    fi
}

first_run() {    # a file that is there when it has ended, command -> that run, made once
    [ ! -f "$1" ] || return 0
    echo "a run to start from first, once: $(dirname "$1")"
    "${@:2}" &
    TRAINER_PID=$!
    wait "$TRAINER_PID" || return
    TRAINER_PID=
}

rows_file() {    # train -> the file of these rows in DATA_DIR, train.parquet or train.jsonl; fails if there is none
    if [ -f "$DATA_DIR/$1.parquet" ]; then
        echo "$DATA_DIR/$1.parquet"
    elif [ -f "$DATA_DIR/$1.jsonl" ]; then
        echo "$DATA_DIR/$1.jsonl"
    else
        return 1
    fi
}

test_rows() {    # the name of the rows to validate on in DATA_DIR: test, or as others call them
    local name
    for name in test validation val dev; do
        if rows_file "$name" >/dev/null; then echo "$name" && return; fi
    done
    echo test
}

check_rows() {    # names of rows that DATA_DIR must hold, such as train
    local rows
    for rows in "$@"; do
        if [ -f "$DATA_DIR/$rows.parquet" ] && [ -f "$DATA_DIR/$rows.jsonl" ]; then
            echo "error: DATA_DIR=$DATA_DIR holds $rows.parquet and $rows.jsonl. Remove the one that is not meant." >&2
            return 2
        fi
        if ! rows_file "$rows" >/dev/null; then
            echo "error: DATA_DIR=$DATA_DIR holds no $rows.parquet and no $rows.jsonl. \`search-r1 rows" \
                "questions.jsonl\` makes such rows of your own questions (docs/your_own_questions.md); or unset" \
                "DATA_DIR to train on the microworld." >&2
            return 2
        fi
    done
}

start_search() {    # run folder -> RETRIEVER_URL of a server on DATA_DIR's corpus
    if [ ! -f "$DATA_DIR/corpus.jsonl" ]; then
        echo "error: DATA_DIR=$DATA_DIR holds no corpus.jsonl to search. Put one there, or give a running server:" \
            "RETRIEVER_URL=http://host:port/retrieve" >&2
        return 2
    fi
    start_server "$DATA_DIR/corpus.jsonl" "$1/retrieval_server.log"
}

asks_retrieval() {    # what verl.preflight.servers says
    [[ $'\n'"$1" == *$'\n'retrieval* ]]
}

answer_servers() {    # what verl.preflight.servers says -> the same for --servers, with DATA_DIR's corpus
    local line
    while IFS= read -r line; do
        case "$line" in
            retrieval*) if [ -f "$DATA_DIR/corpus.jsonl" ]; then echo "retrieval $DATA_DIR/corpus.jsonl"; else echo "$line"; fi ;;
            code) echo code ;;
        esac
    done <<<"$1"
}

sft_overrides() {    # the arguments -> the rows, one setting a line
    local val_rows
    quoted data.train_files "$(rows_file sft_train || echo "$DATA_DIR/sft_train.parquet")" && echo
    if val_rows="$(rows_file sft_val)" && [[ " $*" != *" data.val_files="* ]]; then
        quoted data.val_files "$val_rows" && echo
        echo trainer.test_freq=100
    fi
}

rl_overrides() {    # the arguments -> the questions, one setting a line
    [ ! -f "$DATA_DIR/settings.yaml" ] || { echo "@$DATA_DIR/settings.yaml" && return; }
    quoted data.train_files "$(rows_file train || echo "$DATA_DIR/train.parquet")" && echo
    quoted data.val_files "$(rows_file "$(test_rows)" || echo "$DATA_DIR/test.parquet")" && echo
    # rows of one's own are of another task
    [[ " $*" != *" data.train_files="* && " $*" != *" data.val_files="* ]] || return 0
    [ ! -f "$DATA_DIR/test_3hop.parquet" ] || { quoted data.extra_val_files "$DATA_DIR/test_3hop.parquet" && echo; }
}

recipe_for() {    # tiny|model, sft|grpo|ppo -> the file of settings, in the repository
    case "$1-$2" in
        tiny-*) echo "configs/microworld_$2.yaml" ;;
        model-sft) echo configs/sft.yaml ;;
        model-*) echo "configs/search_r1_$2.yaml" ;;
    esac
}

more_extras() {    # files of settings and the overrides of a run -> ",megatron", ",vllm" if it needs them
    local text="$*" word file
    for word in "$@"; do
        for file in "${word#@}" "$REPO_ROOT/${word#@}"; do
            [[ "$file" != *.yaml || ! -f "$file" ]] || { text+=" $(<"$file")" && break; }
        done
    done
    [[ ! "$text" =~ strategy(=|:\ )megatron|ppo_megatron_trainer ]] || echo -n ,megatron
    [[ ! "$text" =~ rollout\.name=vllm|name:\ vllm ]] || echo -n ,vllm
}

usage() {    # sft|grpo|ppo
    local rows="train.parquet and test.parquet (or validation.parquet)" tiny=data_prep/base_model
    [ "$1" != sft ] || rows="sft_train.parquet, perhaps sft_val.parquet" tiny=data_prep/base_model_plain
    cat <<TEXT
usage: bash train_$1.sh [--config FILE] [--doctor] [--servers] [--rl] [KEY=VALUE ...]
       bash train_$1.sh --help [KEY]

  KEY=VALUE        any key of the configuration, such as trainer.total_training_steps=10
  --config FILE    the settings of FILE (configs/*.yaml, or yours), in place of the shipped ones for the model
  --doctor         only checks the run that it would start (docs/doctor.md); trainer.dry_run=true plans its memory
  --doctor --login only what a machine can know that submits the run as a job, RETRIEVAL_ARGS too (docs/cluster.md)
  --servers        only says which servers the run asks and nobody has given an address for: retrieval, code
  --rl             the driver is an actor on Ray too, beside trainers and samplers (docs/async.md); not for sft
  --help KEY       what a key, or each key of a group such as data, means, takes and is set to

What it reads from the environment (all optional):
  SEED             seed of the world and of the run; default 0
  BASE_MODEL       a Hugging Face folder or hub name; default: a tiny model that is shipped, $tiny. Models with
                   weights below 64 MB get the settings in configs/microworld_$1.yaml, others those in
                   $(recipe_for model "$1")
  DATA_DIR         a folder with $rows (or .jsonl), and corpus.jsonl, which is then
                   served; default: the microworld of the seed, made on the spot. A file settings.yaml in it has keys
                   that say what is read instead of these rows. Rows of your own: docs/your_own_questions.md
  RETRIEVER_URL    a retrieval server that already runs (or several: a,b); default: one is started on DATA_DIR's
                   corpus and stopped at the end. retriever.url=... does the same
  EXPERIMENT_NAME  name of the run and of its folder below verl_checkpoints/; default: after data, model, algorithm,
                   seed, file of settings, and the overrides that decide what the run learns
  VENV_DIR         a folder for the environments that it makes; default: the repository
  VERL__A__B=1     sets the key a.b, more weakly than files and KEY=VALUE do

Paths in these variables, in KEY=VALUE and in your files of settings are relative to the folder in which you call the
script. The shipped settings are found from anywhere. Data and runs that it makes by itself go to data/ and
verl_checkpoints/ of the repository.
Exit status: 0 done, 2 a mistake in what was asked, 3 ended early, 130 interrupted (docs/troubleshooting.md).

TEXT
}

is_own_help() {    # the arguments -> whether they ask for all of the help, not for one key's
    while [ $# -gt 0 ]; do
        [[ "$1" != --help && "$1" != -h ]] || { [[ ! "${2:-}" =~ ^[A-Za-z_][A-Za-z0-9_.]*$ ]] && return; }
        shift
    done
    return 1
}

run_training() {
    local kind="$1" needs_server=true dry_run=false argument extras=train,retrieval config='' is_config=false
    local program=(verl.trainer.main_ppo) doctor=false says_servers=false passed=()
    local login=() prepared=''    # --login's checks; the file that --prepare writes
    shift
    ! is_own_help "$@" || usage "$kind"
    if [[ " $* " == *" --help "* || " $* " == *" -h "* ]] && ! has_python; then
        echo "Every key with its meaning stands here once there is an environment. bash train_$kind.sh makes it."
        return
    fi
    for argument in "$@"; do
        if $is_config; then
            config="$argument" is_config=false
            continue
        fi
        case "$argument" in
            --doctor) doctor=true ;;
            --servers) says_servers=true ;;
            --rl) program=(verl.rl) ;;
            --config) is_config=true ;;
            --config=*) config="${argument#--config=}" ;;
            --login) login+=(--login) doctor=true needs_server=false ;;
            --prepare=*) prepared="${argument#--prepare=}" doctor=true needs_server=false ;;
            *) passed+=("$argument") ;;
        esac
        [[ "$argument" != *trainer.dry_run=[Tt]rue ]] || dry_run=true needs_server=false    # a plan, without data
    done
    [ -z "${RETRIEVER_URL:-}" ] || needs_server=false
    # Its answer alone is on stdout. Demonstrations and plans ask no server.
    if $says_servers; then
        [ "$kind" != sft ] && ! $dry_run || return 0
        exec 3>&1 1>&2
    fi
    if $is_config; then
        echo "error: found --config without a file; expected one such as --config configs/mixture.yaml" >&2
        return 2
    fi

    # What lies in the repository begins with this.
    local home=''
    if [ "$PWD" != "$REPO_ROOT" ]; then
        home="$REPO_ROOT/"
        # Modules of the caller's folder can be imported, and hide none of the repository's.
        export PYTHONSAFEPATH=1 PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}$PWD"
    fi
    local model="${home}data_prep/base_model" configuration=ppo_trainer model_key=actor_rollout_ref.model.path
    if [ "$kind" = sft ]; then
        if [ "${program[0]}" = verl.rl ]; then
            echo "error: found --rl with supervised training; expected train_grpo.sh or train_ppo.sh" >&2
            return 2
        fi
        configuration=sft_trainer model_key=model.partial_pretrain
        model="${home}data_prep/base_model_plain" program=(verl.trainer.fsdp_sft_trainer) needs_server=false extras=train
    fi
    if $doctor; then
        program=(verl.preflight ${login[@]+"${login[@]}"})
        [ -z "$prepared" ] || program=(data_prep.job --out "$prepared")
        [ "$kind" != sft ] || program+=(--config-name sft_trainer)
    fi
    set -- ${passed[@]+"${passed[@]}"}    # without --doctor, --login, --servers and --config, wherever they stood
    trap stop_all EXIT
    trap 'end_early INT' INT
    trap 'end_early USR1' USR1
    trap 'exit 143' TERM
    trap 'exit 129' HUP
    [ -f "$config" ] || [ ! -f "$REPO_ROOT/$config" ] || config="$home$config"    # a recipe of the repository
    [ -n "${BASE_MODEL:-}" ] && model="$(absolute "$BASE_MODEL")"
    [ -n "${DATA_DIR:-}" ] && DATA_DIR="$(absolute "$DATA_DIR")"
    setup_environment "$extras$(more_extras "${config:-}" "$@")"
    export TOKENIZERS_PARALLELISM=false OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT=0 PYTHONUNBUFFERED=1

    local seed="${SEED:-0}" makes_world=false world=microworld start=''
    case "$(basename "$config")" in
        mixture.yaml | hops.yaml) world="$(basename "$config" .yaml)" ;;
    esac
    [ -n "${DATA_DIR:-}" ] || { makes_world=true && DATA_DIR="${home}data/$world/seed$seed"; }

    local data name size=model
    data="$(basename "$(dirname "$DATA_DIR")")-$(basename "$DATA_DIR")"
    if [ -z "${BASE_MODEL:-}" ] && ! $dry_run && ! $doctor && ! $says_servers; then
        case "$world" in
            mixture) start="${home}verl_checkpoints/$data-start/huggingface" ;;
            hops) start="${home}verl_checkpoints/microworld-seed$seed-base_model-$kind-seed$seed" ;;
        esac
    fi
    if [ -z "${BASE_MODEL:-}" ] || is_tiny "$model"; then
        size=tiny
    fi
    local recipe
    recipe="$(recipe_for "$size" "$kind")"
    name="$(model_label "${start:-$model}")"
    name="$data-${name#"$data"-}-$kind-seed$seed$(config_label "$config" "$recipe" "$data")$(overrides_label "$@")"
    name="${EXPERIMENT_NAME:-$name}"
    local run_dir="${home}verl_checkpoints/$name"
    config="${config:-$home$recipe}"
    echo "settings: $config"

    local overrides=(
        "@$config"
        "trainer.seed=$seed" "trainer.project_name=search-r1" "$(quoted trainer.experiment_name "$name")"
        "$(quoted trainer.default_local_dir "$run_dir")" "$(quoted "$model_key" "$model")"
    )
    # A mistake is said, and --help answered, before anything is made. (With --servers a mistake is said later.)
    $says_servers || "$PYTHON" -m verl.config "$configuration" "${overrides[@]}" "$@" || return
    case " $* " in *" --help "* | *" -h "* | *" --print "* | *" --origins "*) return ;; esac

    if ! $dry_run; then
        ! $makes_world || make_world "$seed" "$kind" "$world"
        if [ -n "$start" ]; then
            if [ "$world" = mixture ]; then
                first_run "$start/config.json" env SEED="$seed" DATA_DIR="$DATA_DIR" BASE_MODEL="${home}data_prep/base_model" \
                    EXPERIMENT_NAME="$(model_label "$start")" bash "${home}train_sft.sh" --config "${config%.yaml}_sft.yaml"
            else
                first_run "$start/summary.json" env -u DATA_DIR SEED="$seed" EXPERIMENT_NAME="${start##*/}" \
                    bash "${home}train_$kind.sh"
                start="$start/global_step_$(cat "$start/latest_checkpointed_iteration.txt")/actor/huggingface"
            fi
            overrides+=("$(quoted "$model_key" "$start")")
        fi
        if [ "$kind" = sft ]; then check_rows sft_train; else check_rows train "$(test_rows)"; fi
        if ! $says_servers; then
            RUN_DIR="$run_dir"
            mkdir -p "$run_dir"
        fi
    fi
    while IFS= read -r argument; do
        overrides+=("$argument")
    done < <(if [ "$kind" = sft ]; then sft_overrides "$@"; else rl_overrides "$@"; fi)

    # The rows are there now: do they search, and do the settings say where?
    if $needs_server || $says_servers; then
        local servers
        servers="$("$PYTHON" -m verl.preflight.servers "$PYTHON" -m verl.trainer.main_ppo "${overrides[@]}" "$@")" || return
        if $says_servers; then
            answer_servers "$servers" >&3
            return
        fi
        ! asks_retrieval "$servers" || start_search "$run_dir"
    fi
    [ "$kind" = sft ] || [ -z "${RETRIEVER_URL:-}" ] || overrides+=("$(quoted retriever.url "$RETRIEVER_URL")")

    # In the background, so that a signal to this script is handled at once and not after the run.
    echo "starting ${program[0]} ..."
    ${WITH_PRELOAD[@]+"${WITH_PRELOAD[@]}"} "$PYTHON" -m "${program[@]}" "${overrides[@]}" "$@" &
    TRAINER_PID=$!
    local status interrupted=true
    # It ends its step, writes a checkpoint and stops; or has ended already. Before its first step, a Ctrl-C (which is
    # passed on as USR2) ends it at once, and so does a second one later.
    trap 'interrupted=true; kill -USR1 "$TRAINER_PID" 2>/dev/null || true' USR1
    $doctor ||
        trap 'trap end_at_once INT; interrupted=true; kill -USR2 "$TRAINER_PID" 2>/dev/null || true' INT
    while $interrupted; do
        interrupted=false status=0
        wait "$TRAINER_PID" 2>/dev/null || status=$?    # the shell would name a signal that ended it
    done
    TRAINER_PID=    # it has ended: its number may be somebody else's by now
    case "$status" in
        138) end_early USR1 ;;    # the signal came while it was loading, before it listened to signals
        140) end_early INT ;;
        2 | 3 | 130) EMPTY_RUN_DIR="$RUN_DIR" ;;    # an attempt that wrote nothing leaves no folder
    esac
    return "$status"
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then    # it is run, not sourced
    answer_help "$@"
    echo "error: found run_training.sh run as a program; expected train_sft.sh, train_grpo.sh or train_ppo.sh" >&2
    exit 2
fi
