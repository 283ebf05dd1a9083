#!/usr/bin/env bash
# Serves a corpus: bash retrieval_launch.sh --corpus_path corpus.jsonl [--index_path INDEX] [--topk 3]
#                      [--retriever_name bm25|lucene|e5|...] [--host 0.0.0.0] [--port 8000] [--workers 1]
#                      (all flags: --help)
#
# When neither a corpus nor an index nor another retriever is named it serves the microworld of seed SEED (default
# 0), which is made if it is not there. The flags are checked before anything is installed. BM25 needs only the
# `retrieval` extra, no torch and no Ray. An active environment is used as it is, otherwise .venv-retrieval is made
# with what the retriever needs. Training and infer.py find the server at http://HOST:PORT/retrieve.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/scripts/setup.sh"

if [ -n "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ]; then
    checker="$(command -v python || command -v python3)"
else
    checker="$(find_python)"
fi
check=("$checker" -m search_r1.search.launch "$@")
export PYTHONPATH="$REPO_ROOT${PYTHONPATH:+:$PYTHONPATH}"
for argument in "$@"; do
    case "$argument" in -h | --help) exec "${check[@]}" ;; esac
done
checked="$("${check[@]}")"
read -r extras microworld <<<"$checked"
setup_environment "$extras" "$VENV_ROOT/.venv-retrieval"

arguments=("$@")
if [ "$microworld" = microworld ]; then
    world="$REPO_ROOT/data/microworld/seed${SEED:-0}"
    if [ ! -f "$world/corpus.jsonl" ]; then
        (cd "$REPO_ROOT" && "$PYTHON" -m data_prep.microworld --seed "${SEED:-0}" --out "$world" --corpus-only)
    fi
    arguments=(--corpus_path "$world/corpus.jsonl" "$@")
fi
exec "$PYTHON" -m search_r1.search.server "${arguments[@]}"
