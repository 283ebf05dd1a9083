# The body of train_grpo.sh and train_ppo.sh: environment, data, retrieval server, run. Source it, then call
#
#     run_training NAME "PRESET OVERRIDES ..." "$@"
#
# What it reads from the environment (all optional):
#   BASE_MODEL     a Hugging Face folder or hub name; default: the tiny model that is shipped, data_prep/base_model
#   DATA_DIR       a folder with train.parquet and test.parquet (and corpus.jsonl, which is then served);
#                  default: the microworld of the seed, made on the spot
#   SEED           seed of the world and of the run; default 0
#   RETRIEVER_URL  a retrieval server that already runs; default: one is started on DATA_DIR's corpus and stopped
#                  at the end. `retriever.url=...` on the command line does the same.
#   EXPERIMENT_NAME  name of the run and of its folder below verl_checkpoints/

source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$REPO_ROOT"

stop_server() {
    if [ -n "${SERVER_PID:-}" ] && kill -0 "$SERVER_PID" 2>/dev/null; then
        kill "$SERVER_PID" 2>/dev/null || true
        wait "$SERVER_PID" 2>/dev/null || true
    fi
}

wait_for_server() {    # health URL; fails when the server has ended or is not ready after 30 minutes
    local _
    for _ in $(seq 18000); do
        kill -0 "$SERVER_PID" 2>/dev/null || return 1
        "$PYTHON" - "$1" <<'PY' && return 0
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

start_server() {    # corpus -> RETRIEVER_URL
    local corpus="$1" log="$2" port
    port="$("$PYTHON" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')"
    "$PYTHON" -m search_r1.search.server --host 127.0.0.1 --port "$port" \
        --retriever_name bm25 --corpus_path "$corpus" >"$log" 2>&1 &
    SERVER_PID=$!
    RETRIEVER_URL="http://127.0.0.1:$port/retrieve"
    if ! wait_for_server "http://127.0.0.1:$port/health"; then
        echo "error: the retrieval server did not start on $corpus. The end of its log ($log):" >&2
        tail -n 5 "$log" >&2
        return 1
    fi
}

run_training() {
    local algorithm="$1" preset="$2" model_preset url_given=false argument
    shift 2
    for argument in "$@"; do [[ "$argument" == *retriever.url=* || "$argument" == do_search=[Ff]alse ]] && url_given=true; done
    [ -n "${RETRIEVER_URL:-}" ] && url_given=true

    setup_environment train,retrieval
    export TOKENIZERS_PARALLELISM=false OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT=0 PYTHONUNBUFFERED=1

    local seed="${SEED:-0}" world=false
    if [ -z "${DATA_DIR:-}" ]; then
        world=true
        DATA_DIR="data/microworld/seed$seed"
        if [ ! -f "$DATA_DIR/corpus.jsonl" ] || [ ! -f "$DATA_DIR/test_3hop.parquet" ]; then
            "$PYTHON" -m data_prep.microworld --seed "$seed" --out "$DATA_DIR"
        fi
    fi
    for argument in train.parquet test.parquet; do
        if [ ! -f "$DATA_DIR/$argument" ]; then
            echo "error: DATA_DIR=$DATA_DIR holds no $argument. Make one with data_prep/squad.py, or unset DATA_DIR" \
                "to train on the microworld." >&2
            return 1
        fi
    done

    local model="${BASE_MODEL:-data_prep/base_model}" name
    name="${EXPERIMENT_NAME:-$(basename "$(dirname "$DATA_DIR")")-$(basename "$DATA_DIR")-$(basename "$model")-$algorithm-seed$seed}"
    local run_dir="verl_checkpoints/$name"
    mkdir -p "$run_dir"

    local overrides=(
        "data.train_files=$DATA_DIR/train.parquet" "data.val_files=$DATA_DIR/test.parquet"
        "actor_rollout_ref.model.path=$model" "critic.model.path=$model"
        "trainer.seed=$seed" "trainer.experiment_name=$name" "trainer.default_local_dir=$run_dir"
    )
    $world && overrides+=("data.extra_val_files=$DATA_DIR/test_3hop.parquet")

    trap stop_server EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    if ! $url_given; then
        if [ ! -f "$DATA_DIR/corpus.jsonl" ]; then
            echo "error: DATA_DIR=$DATA_DIR holds no corpus.jsonl to search. Put one there, or give a running server:" \
                "RETRIEVER_URL=http://host:port/retrieve" >&2
            return 1
        fi
        start_server "$DATA_DIR/corpus.jsonl" "$run_dir/retrieval_server.log"
    fi
    [ -n "${RETRIEVER_URL:-}" ] && overrides+=("retriever.url=$RETRIEVER_URL")

    # shellcheck disable=SC2086  # the preset is a list of words
    "$PYTHON" -m verl.trainer.main_ppo "${overrides[@]}" $preset "$@"
}
