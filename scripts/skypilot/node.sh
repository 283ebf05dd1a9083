#!/usr/bin/env bash
# One node of scripts/skypilot/train.yaml, on which SkyPilot runs this. It has never been run in a cloud.
#
# The last node serves retrieval, all others train, and the first of them has the driver. The others end when the driver
# has ended, as SkyPilot's job goes on until all nodes are done: they ask at a port that the first node has open meanwhile.
#
# What it reads from the environment: what train.yaml has below `envs`, and SKYPILOT_NODE_RANK, SKYPILOT_NODE_IPS and
# SKYPILOT_NUM_GPUS_PER_NODE, which SkyPilot sets.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/setup.sh
answer_help "$@"

RETRIEVAL_PORT="${RETRIEVAL_PORT:-8000}" RAY_PORT="${RAY_PORT:-6379}" RUNNING_PORT="${RUNNING_PORT:-6391}"
RETRIEVAL_TIMEOUT="${RETRIEVAL_TIMEOUT:-3600}"    # seconds until the server must be ready
SILENT_SECONDS="${SILENT_SECONDS:-20}"    # without an answer for so long, the driver has ended
CHILDREN=()

mapfile -t NODES <<<"$SKYPILOT_NODE_IPS"
HEAD="${NODES[0]}" OWN="${NODES[$SKYPILOT_NODE_RANK]}" SERVER="${NODES[-1]}"
num_training=$((${#NODES[@]} - 1))
if [ "$num_training" -lt 1 ]; then
    echo "error: found one node; expected num_nodes: 2 or more, of which the last serves retrieval" >&2
    exit 2
fi
NO_PROXY="$(IFS=,; echo "${NODES[*]}"),localhost,127.0.0.1${NO_PROXY:+,$NO_PROXY}"
export NO_PROXY no_proxy="$NO_PROXY"
for name in BASE_MODEL DATA_DIR HF_TOKEN; do [ -n "${!name:-}" ] || unset "$name"; done    # SkyPilot sets them all
read -ra RETRIEVAL <<<"${RETRIEVAL_ARGS:-}"
read -ra TRAIN <<<"${TRAIN_COMMAND:-bash train_grpo.sh}"
read -ra MORE <<<"${OVERRIDES:-}"

end_children() {
    local pid
    for pid in "${CHILDREN[@]}"; do kill "$pid" 2>/dev/null || true; done
    wait
}
trap end_children EXIT
trap 'exit 143' TERM INT

is_running() { (exec 3<>"/dev/tcp/$HEAD/$RUNNING_PORT") 2>/dev/null; }    # the driver

start() {    # command: in the background
    "$@" &
    CHILDREN+=($!)
}

until_the_driver_ends() {    # command
    local silent=0
    start "$@"
    until is_running; do
        kill -0 "${CHILDREN[0]}" 2>/dev/null || wait "${CHILDREN[0]}"
        sleep 1
    done
    while [ "$silent" -lt "$SILENT_SECONDS" ]; do
        kill -0 "${CHILDREN[0]}" 2>/dev/null || wait "${CHILDREN[0]}"    # its status becomes that of the node
        if is_running; then silent=0; else silent=$((silent + 1)); fi
        sleep 1
    done
}

if [ "$SKYPILOT_NODE_RANK" = "$num_training" ]; then
    if [ "${#RETRIEVAL[@]}" = 0 ] && [ -n "${DATA_DIR:-}" ]; then
        RETRIEVAL=(--corpus_path "$DATA_DIR/corpus.jsonl")
    fi
    until_the_driver_ends bash retrieval_launch.sh "${RETRIEVAL[@]}" --host 0.0.0.0 --port "$RETRIEVAL_PORT"
    exit
fi
if [ "$SKYPILOT_NODE_RANK" != 0 ]; then
    until_the_driver_ends bash scripts/ray_node.sh worker --head "$HEAD:$RAY_PORT" --address "$OWN"
    exit
fi

start python3 -c 'import socket, sys
listener = socket.create_server(("", int(sys.argv[1])))
while True:
    listener.accept()[0].close()' "$RUNNING_PORT"
if [ "$num_training" -gt 1 ]; then
    start bash scripts/ray_node.sh head --address "$HEAD" --port "$RAY_PORT"
    export RAY_ADDRESS="$HEAD:$RAY_PORT"
fi
until curl -fs --max-time 5 "http://$SERVER:$RETRIEVAL_PORT/health" | grep -q '"ready"'; do
    if [ "$SECONDS" -ge "$RETRIEVAL_TIMEOUT" ]; then
        echo "error: the retrieval server at $SERVER:$RETRIEVAL_PORT is not ready after $RETRIEVAL_TIMEOUT s" >&2
        exit 1
    fi
    sleep 1
done
devices=("trainer.n_gpus_per_node=${SKYPILOT_NUM_GPUS_PER_NODE:-0}")
[ "${SKYPILOT_NUM_GPUS_PER_NODE:-0}" -gt 0 ] || devices=(trainer.n_gpus_per_node=1 trainer.device=cpu)
start "${TRAIN[@]}" "trainer.nnodes=$num_training" "${devices[@]}" \
    "retriever.url=http://$SERVER:$RETRIEVAL_PORT/retrieve" "${MORE[@]}"
wait "${CHILDREN[-1]}"
