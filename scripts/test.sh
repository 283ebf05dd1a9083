#!/usr/bin/env bash
# Checks everything: makes the environment if none of yours is active, then style, types, the fast tests, the slow tests, and
# says how long each took.
#   bash scripts/test.sh            all of it
#   bash scripts/test.sh --fast     without the slow tests
#   bash scripts/test.sh --vllm     all of it and scripts/test_vllm.sh, beside the slow tests; both environments are
#                                   made at once
#   bash scripts/test.sh -k packs tests/packing      everything else goes to pytest as it is
set -euo pipefail
source "$(dirname "$0")/setup.sh"
answer_help "$@"
cd "$REPO_ROOT"

phase() {    # name, command: runs it and says how long it took
    local name="$1" start=$SECONDS status=0
    shift
    "$@" || status=$?
    printf -- '---- %s: %s, %d s\n' "$name" "$([ "$status" -eq 0 ] && echo passed || echo "failed ($status)")" \
        "$((SECONDS - start))"
    return "$status"
}

fast_only=false with_vllm=false
case "${1:-}" in
    --fast) fast_only=true; shift ;;
    --vllm) with_vllm=true; shift ;;
esac
if $with_vllm && [ $# -gt 0 ]; then echo "error: --vllm takes no further arguments" >&2; exit 2; fi

export PIP_COMPILE=no    # most modules of an environment are never imported, and pip compiles them one by one
log="$(mktemp)"
# shellcheck disable=SC2046    # ids of jobs that go on, and of their groups
trap 'kill -- $(jobs -pr | sed "p;s/^/-/") 2>/dev/null || true; rm -f "$log"' EXIT
if $with_vllm; then    # the first line: Linux weighs whole sessions, and nice within each
    setsid nice -n 19 bash -c '{ echo 19 >/proc/self/autogroup; } 2>/dev/null
        source scripts/setup.sh; setup_environment test,vllm' >>"$log" 2>&1 &
fi
setup_environment test,verifiers
# Lucene's jar is in this package; the 150 that it depends on are not needed. Without it those tests are skipped.
if ! is_users_environment; then
    "$PYTHON" -m pip install -q --no-deps pyserini==0.24.0
fi
echo "---- environment: $SECONDS s"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
unset PYTHONDONTWRITEBYTECODE    # else each process that runs tests compiles them anew

if [ $# -gt 0 ]; then
    $fast_only && set -- -m "not slow" "$@"
    rm "$log"
    exec "$PYTHON" -m pytest "$@"
fi

# Beside style and types: what these compile is kept, all modules too, and each process of the fast tests would do it.
"$PYTHON" -m pytest -q -p no:cacheprovider -m "not slow" \
    -k "test_cpu_kernel.py or test_contexts.py or test_generation_with_a_model.py" >/dev/null 2>&1 &
compiling=$!
phase style "$PYTHON" -m ruff check .
phase format "$PYTHON" -m ruff format --check .
phase types "$PYTHON" -m mypy
parallel() {    # so many more processes than there are cores, a mark's expression, options: tests side by side
    "$PYTHON" -m pytest -q -n "$("$PYTHON" -c "import os; print(min(4, $1 + os.cpu_count()))")" --dist worksteal \
        -m "$2" "${@:3}"
}
wait "$compiling" || true    # the fast tests say why
phase "fast tests" parallel 1 "not slow" --durations=5    # one that waits leaves its core to another
$fast_only && exit
if $with_vllm; then    # waits for the installation, if it has not ended
    setsid nice -n 10 bash scripts/test_vllm.sh >>"$log" 2>&1 &
    vllm=$!
fi
phase "slow tests" parallel 0 "slow and not alone" --durations=10
if $with_vllm; then
    phase "vLLM tests (after the others)" wait "$vllm" || { cat "$log"; exit 1; }
    cat "$log"
fi
phase "slow tests, alone" "$PYTHON" -m pytest -q -m "slow and alone" --durations=10    # some measure times
