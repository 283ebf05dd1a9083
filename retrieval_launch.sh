#!/usr/bin/env bash
# Serves a corpus: bash retrieval_launch.sh --corpus_path corpus.jsonl [--index_path FOLDER] [--topk 3]
#                      [--host 0.0.0.0] [--port 8000]     (all flags: --help)
#
# With no --corpus_path it serves the microworld of seed SEED (default 0), which is made if it is not there.
# It needs only the `retrieval` extra, no torch and no Ray: an active environment is used as it is, otherwise
# .venv-retrieval is made. Training and infer.py find the server at http://HOST:PORT/retrieve.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/scripts/setup.sh"
setup_environment retrieval "$REPO_ROOT/.venv-retrieval"

arguments=("$@") own_corpus=true
for argument in "$@"; do
    case "$argument" in --corpus_path | --corpus_path=* | -h | --help) own_corpus=false ;; esac
done
if $own_corpus; then
    world="$REPO_ROOT/data/microworld/seed${SEED:-0}"
    if [ ! -f "$world/corpus.jsonl" ]; then
        (cd "$REPO_ROOT" && "$PYTHON" -m data_prep.microworld --seed "${SEED:-0}" --out "$world" --corpus-only)
    fi
    arguments=(--corpus_path "$world/corpus.jsonl" "$@")
fi
exec "$PYTHON" -m search_r1.search.server "${arguments[@]}"
