#!/usr/bin/env bash
# A pretrained language model (Gemma 3, 270M parameters) learns to search Wikipedia: from its packages to a page that
# says what it could do before, after a supervised start, and after GRPO. docs/real_model.md tells more.
#
#   bash scripts/real_model.sh            at most 150 minutes on two cores
#   bash scripts/real_model.sh --short    the same stages in 15 minutes: fewer steps and questions
#   bash scripts/real_model.sh sft.optim.lr=1e-5 grpo.max_turns=3 test.data.val_data_num=50
#       any setting of the supervised start, of GRPO (and so of the evaluations), of the evaluations alone
#
# A stage whose result is there is passed over, and a training goes on from its last checkpoint: after a kill at any
# moment the same command goes on.
#
# What it reads from the environment (all optional):
#   SEED       of the split into training and test, and of all runs; default 0
#   SOURCES    folder with the three files of questions and passages; default data/sources. Where one is missing, the
#              script says how to fetch it.
#   MODEL      a Hugging Face folder to start from; default: Gemma 3 270M, which is fetched (Gemma's terms hold)
#   NUM_VAL    questions that are asked during GRPO, taken from those of training; default 64
#   MINUTES    for the whole: GRPO ends early if they run out; default 150, with --short 15
#   NAME       of the folders below data/ and verl_checkpoints/; default real_model-seed$SEED, with --short
#              real_model-short-seed$SEED
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/run_training.sh"
answer_help "$@"
cd "$REPO_ROOT"
SEED="${SEED:-0}" NUM_VAL="${NUM_VAL:-64}" short=
SOURCES="${SOURCES:-data/sources}"
SOURCES="$(absolute "$SOURCES")"
[[ "$SOURCES" == /* ]] || SOURCES="$REPO_ROOT/$SOURCES"    # it is not there, and will be looked for here
model="$(absolute "${MODEL:-$REPO_ROOT/data/gemma-3-270m}")"    # the same before it is there and after
sft=() grpo=() asked=()
for argument in "$@"; do
    case "$argument" in
        --short) short=-short ;;
        sft.*=*) sft+=("${argument#sft.}") ;;
        grpo.*=*) grpo+=("${argument#grpo.}") ;;
        test.*=*) asked+=("${argument#test.}") ;;
        *)
            echo "error: found $argument; expected --short, sft.KEY=VALUE, grpo.KEY=VALUE or test.KEY=VALUE" >&2
            exit 2
            ;;
    esac
done
if [ -n "$short" ]; then
    sft=(trainer.total_training_steps=8 data.val_files=null ${sft[@]+"${sft[@]}"})
    grpo=(trainer.total_training_steps=8 data.train_batch_size=8 actor_rollout_ref.actor.ppo_mini_batch_size=64
        actor_rollout_ref.actor.optim.lr=1e-5 trainer.val_before_train=false trainer.test_freq=-1 data.val_data_num=16 ${grpo[@]+"${grpo[@]}"})
    asked=(data.val_data_num=48 data.extra_val_files=null ${asked[@]+"${asked[@]}"})
fi
MINUTES="${MINUTES:-$([ -n "$short" ] && echo 15 || echo 150)}" NAME="${NAME:-real_model$short-seed$SEED}"
data="data/$NAME" root="verl_checkpoints/$NAME"

# The files of questions and passages: public repositories on GitHub. Nothing here fetches them.
SOURCE_FILES=(xquad.en.json 2wikimultihopqa_corpus.json hotpot_dev_v1_simplified.json)
source_url() {    # file -> its address
    local host=https://raw.githubusercontent.com
    case "$1" in
        xquad.en.json) echo "$host/google-deepmind/xquad/master/$1" ;;
        2wikimultihopqa_corpus.json)
            echo "$host/OSU-NLP-Group/HippoRAG/191f281122e2437743daf1dd2dae23059a14c088/reproduce/dataset/$1"
            ;;
        hotpot_dev_v1_simplified.json) echo "$host/ysymyth/ReAct/master/data/$1" ;;
    esac
}

missing=()
for file in "${SOURCE_FILES[@]}"; do
    [ -f "$SOURCES/$file" ] || missing+=("$file")
done
if [ ${#missing[@]} -gt 0 ]; then
    echo "error: SOURCES=$SOURCES holds no ${missing[*]}; expected the files of questions and passages there. Fetch" \
        "them, and start this again (or say where they are: SOURCES=folder):" >&2
    for file in "${missing[@]}"; do
        printf 'curl -fL --create-dirs -o %q %q\n' "$SOURCES/$file" "$(source_url "$file")" >&2
    done
    exit 2
fi
settings="$(printf '%s\n' "SEED=$SEED" "SOURCES=$SOURCES" "MODEL=$model" "NUM_VAL=$NUM_VAL" "$*")"
for folder in "$data" "$root"; do
    if [ -f "$folder/settings.txt" ] && [ "$settings" != "$(cat "$folder/settings.txt")" ]; then
        echo "error: $folder holds results with other settings than these:" >&2
        diff "$folder/settings.txt" <(echo "$settings") >&2 || true
        echo "Give those again, another name (NAME=...), or remove $data and $root." >&2
        exit 2
    fi
done

STAGE='' stage_begun=0
end_stage() { [ -z "$STAGE" ] || echo "$STAGE $((SECONDS - stage_begun))" >>"$root/seconds.txt"; STAGE=''; }
trap 'end_stage; stop_all' EXIT
trap 'echo "interrupted: the same command goes on from the last checkpoint" >&2; exit 130' INT
trap 'exit 143' TERM
trap 'exit 129' HUP
# Nothing that is started outlives this script, even if it is killed (where setpriv can do that).
# shellcheck disable=SC2046  # words to split
guard() { exec $(setpriv --pdeathsig TERM true 2>/dev/null && echo setpriv --pdeathsig TERM) "$@"; }
spent() { awk '{ all += $2 } END { print all + 0 }' "$root/seconds.txt" 2>/dev/null || echo 0; }

wait_for_stage() {    # of TRAINER_PID -> its status
    local status=0
    wait "$TRAINER_PID" || status=$?
    TRAINER_PID=''
    return "$status"
}

stage() {    # name, what is there when it is done, command...
    local name="$1" result="$2"
    shift 2
    if [ -e "$result" ]; then
        echo "==== $name: is there ($result)"
        return
    fi
    STAGE="$name" stage_begun=$SECONDS
    echo "==== $name: begins after $(($(spent) / 60)) of $MINUTES minutes"
    "$@"
    end_stage
    echo "==== $name: done in $((SECONDS - stage_begun)) s"
}

run() {    # module, arguments...
    guard "$PYTHON" -m "$@" &
    TRAINER_PID=$!
    wait_for_stage
}

setting() {    # key -> its value in GRPO's settings
    "$PYTHON" -m verl.config ppo_trainer @configs/real_model_grpo.yaml ${grpo[@]+"${grpo[@]}"} --print |
        "$PYTHON" -c 'import functools, sys, yaml
print(functools.reduce(dict.__getitem__, sys.argv[1].split("."), yaml.safe_load(sys.stdin)))' "$1"
}

make_rows() {
    rm -rf "$1.part"
    run data_prep.squad --squad "$SOURCES/xquad.en.json" --passages "$SOURCES/2wikimultihopqa_corpus.json" \
        --seed "$SEED" --split-by article --test-share 0.35 --num-val "$NUM_VAL" --prompt base --out "$1.part"
    run data_prep.real_demonstrations --data "$1.part" --seed "$SEED" --tokenizer "$model" \
        --topk "$(setting retriever.topk)" --max-searches "$(setting max_turns)" \
        --max-obs-length "$(setting data.max_obs_length)"
    run data_prep.hotpot --corpus "$1.part/corpus.jsonl" --questions "$SOURCES/hotpot_dev_v1_simplified.json" \
        --prompt base --out "$1.part"
    "$PYTHON" - "$1.part/test_films.parquet" <<'PY'    # so many tell enough
import sys, pandas
rows = pandas.read_parquet(sys.argv[1])
rows.sample(min(100, len(rows)), random_state=0).to_parquet(sys.argv[1])
PY
    mv "$1.part" "$1"
}

make_vocabulary() {
    rm -rf "$1.part"
    run data_prep.trim_vocabulary --model "$model" --texts "$data"/rows/*.jsonl "$data"/rows/*.parquet \
        --out "$1.part"
    "$PYTHON" -c 'from data_prep.prompts import BASE_PROMPT; print(BASE_PROMPT, end="")' >"$1.part/prompt_template.txt"
    mv "$1.part" "$1"
}

train() {    # sft|grpo, name of the run, model, overrides...
    local kind="$1" run="$2" start="$3"
    shift 3
    EXPERIMENT_NAME="$NAME/$run" BASE_MODEL="$start" DATA_DIR="$data/rows" SEED="$SEED" \
        guard bash "train_$kind.sh" --config "configs/real_model_$kind.yaml" "$@" &
    TRAINER_PID=$!
}

evaluate() {    # name, model, overrides...: asks the test questions, by the loop of training
    train grpo "$1" "$2" ${grpo[@]+"${grpo[@]}"} trainer.val_only=true 'trainer.val_modes=[greedy,sampled]' \
        "data.extra_val_files=['$data/rows/test_2hop.parquet','$data/rows/test_films.parquet']" "${@:3}" ${asked[@]+"${asked[@]}"}
    wait_for_stage
}

supervise() {
    train sft sft "$data/model" ${sft[@]+"${sft[@]}"}
    wait_for_stage
}

reinforce() {    # GRPO, within the time that the evaluations after it leave
    local status=0 left asking
    asking="$(awk '$1 == "sft_test" { all += $2 } END { print all + 0 }' "$root/seconds.txt")"
    left=$((MINUTES * 60 - $(spent) - 2 * asking - 120))
    rm -f "$root/out_of_time"
    train grpo grpo "$root/sft/huggingface" "$(quoted data.val_files "$data/rows/val.parquet")" \
        ${grpo[@]+"${grpo[@]}"}
    (    # a step is ended and a checkpoint written before it stops
        end=$((SECONDS + (left > 180 ? left : 180)))
        while kill -0 "$TRAINER_PID" 2>/dev/null && ((SECONDS < end)); do sleep 2 >/dev/null 2>&1; done
        kill -USR1 "$TRAINER_PID" 2>/dev/null && touch "$root/out_of_time" &&
            echo "The time is up: GRPO ends after this step (MINUTES=$MINUTES)."
    ) &
    TICKER_PID=$!
    wait_for_stage || status=$?
    kill "$TICKER_PID" 2>/dev/null || true
    TICKER_PID=''
    [ "$status" = 0 ] || { [ "$status" = 3 ] && [ -f "$root/out_of_time" ]; } || return "$status"
    last="$(cat "$root/grpo/latest_checkpointed_iteration.txt")" || return
    ln -sfn "grpo/global_step_$last/actor/huggingface" "$root/trained"
}

few=(data.val_data_num=100 'trainer.val_modes=[greedy]' data.extra_val_files=null)    # without searches
# Does it search because it must? As many questions, whose searches find the passages of other questions, or none.
controls='trainer.evals=[{retriever: shuffled, n: 100, temperature: 0}, {retriever: empty, n: 100, temperature: 0}]'
setup_environment "train,retrieval,scripts$([ -n "${MODEL:-}" ] || echo ,gemma)"
export TOKENIZERS_PARALLELISM=false OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT=0 PYTHONUNBUFFERED=1
mkdir -p "$data" "$root"
for folder in "$data" "$root"; do
    [ -f "$folder/settings.txt" ] || echo "$settings" >"$folder/settings.txt"
done

[ -n "${MODEL:-}" ] || stage model "$model/config.json" run data_prep.gemma --out "$model"
stage rows "$data/rows" make_rows "$data/rows"
stage vocabulary "$data/model" make_vocabulary "$data/model"

start_server "$data/rows/corpus.jsonl" "$root/retrieval_server.log"
export RETRIEVER_URL
done_mark() { echo "$root/$1/summary.json"; }
stage few_shot_test "$(done_mark few_shot_test)" evaluate few_shot_test "$data/model" \
    "$(quoted data.val_files "$data/rows/test_fewshot.parquet")" data.max_start_length=1024 data.max_prompt_length=2304
stage sft "$(done_mark sft)" supervise
stage sft_test "$(done_mark sft_test)" evaluate sft_test "$root/sft/huggingface"
stage grpo "$root/trained" reinforce
stage grpo_test "$(done_mark grpo_test)" evaluate grpo_test "$root/trained" "$controls"
# The one turn is long enough to make up a passage before the answer.
stage no_search "$(done_mark no_search)" evaluate no_search "$root/trained" "${few[@]}" do_search=false \
    data.max_response_length=320
"$PYTHON" scripts/real_model_report.py "$root"
echo "Ask it: bash retrieval_launch.sh --corpus_path $data/rows/corpus.jsonl &"
echo "        python infer.py --model $root/trained --question \"...\""
