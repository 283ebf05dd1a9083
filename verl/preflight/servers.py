"""Say which servers a program asks that nobody has given an address for: `python -m verl.preflight.servers`.

    python -m verl.preflight.servers bash train_grpo.sh --config FILE KEY=VALUE...
        -> program rl           what it is: rl, sft, evaluation or other
           retrieval CORPUS     it searches; CORPUS lies beside its rows, where there is one
           code                 its rows have programs tested

    bash train_grpo.sh --servers, python -m verl.evaluation --servers
        -> the same without the first line

The environments and verifiers are those of the rows, so the rows must be there; `train_grpo.sh --servers`
makes the microworld's. A program that is not known here (`other`) is taken for one that searches. It needs no
torch.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from verl.config.command_line import parse
from verl.config.loading import Loaded
from verl.data.remote_rows import with_local_rows
from verl.data.row_environments import row_files, searches
from verl.data.row_programs import runs_programs
from verl.utils.text import printable

RETRIEVAL = "retrieval"
CODE = "code"
RL = "rl"
SFT = "sft"
EVALUATION = "evaluation"
OTHER = "other"
_MODULES = {
    "verl.trainer.main_ppo": RL,
    "verl.trainer.main_ppo_format": RL,
    "verl.rl": RL,
    "verl.trainer.fsdp_sft_trainer": SFT,
    "verl.evaluation": EVALUATION,
    "verl.synthesis": EVALUATION,
}
_SCRIPTS = {"train_grpo.sh": RL, "train_ppo.sh": RL, "train_sft.sh": SFT}
_COMMANDS = {  # of search-r1
    "train": RL,
    "ppo": RL,
    "rl": RL,
    "sft": SFT,
    "evaluate": EVALUATION,
    "synthesize": EVALUATION,
}
_ANSWERED_HERE = ("verl.trainer.main_ppo", "verl.trainer.main_ppo_format", "verl.rl", "rl")
_INTERPRETER = re.compile(r"(ba|da|z)?sh|python[\d.]*")


def servers_without_address(loaded: Loaded) -> list[str]:
    """Return the lines on the servers that a run asks and that neither settings nor variables give."""
    config = loaded.config
    if config.trainer.dry_run:
        return []
    has_url = loaded.origins["retriever.url"] != "default" or bool(os.environ.get("RETRIEVER_URL"))
    has_code_url = bool(config.verifiers.code.api_url or os.environ.get("CODE_API_URL"))
    lines = []
    if not has_url and searches(config):
        lines.append(retrieval_line(path for path, _ in row_files(config)))
    if not has_code_url and runs_programs(config):
        lines.append(CODE)
    return lines


def retrieval_line(files: Iterable[Path]) -> str:
    """Return the line that says that a program searches, with the corpus that lies beside its rows."""
    for file in files:
        corpus = file.expanduser().parent / "corpus.jsonl"
        if corpus.is_file():
            return f"{RETRIEVAL} {corpus}"
    return RETRIEVAL


def recognise(command: Sequence[str]) -> tuple[str, int]:
    """Return the kind of a program, and the position in its command where its arguments begin."""
    for number, word in enumerate(command):
        following = command[number + 1] if number + 1 < len(command) else ""
        if word == "-m" and following in _MODULES:
            return _MODULES[following], number + 2
        if Path(word).name in _SCRIPTS:
            return _SCRIPTS[Path(word).name], number + 1
        if Path(word).name == "search-r1" and following in _COMMANDS:
            return _COMMANDS[following], number + 2
    return OTHER, len(command)


def check_command(command: Sequence[str]) -> None:
    """Raise ValueError if there is no such program: no file, no module."""
    words = list(command)
    while words and (words[0] == "env" or re.match(r"\w+=", words[0])):
        del words[0]
    shown = " ".join(command)
    if not words:
        raise ValueError("Found an empty command; expected one such as bash train_grpo.sh.")
    if shutil.which(words[0]) is None:
        raise ValueError(f"Found the command {shown!r}; expected a program, but there is no file {words[0]}.")
    if not _INTERPRETER.fullmatch(Path(words[0]).name):
        return
    for number, word in enumerate(words[1:], 1):
        if word == "-c":
            return
        if word == "-m":
            module = words[number + 1] if number + 1 < len(words) else ""
            if not _has_module(module):
                raise ValueError(
                    f"Found the command {shown!r}; expected a module after -m, but there is no {module}."
                )
            return
        if not word.startswith("-"):
            if not Path(word).is_file():
                raise ValueError(
                    f"Found the command {shown!r}; expected a script, but there is no file {word} "
                    f"in {Path.cwd()}."
                )
            return


def _has_module(name: str) -> bool:
    try:
        return bool(name) and importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def answer(command: Sequence[str]) -> int:
    """Print what a program is and which servers it asks; return the exit status."""
    check_command(command)
    kind, number = recognise(command)
    print(f"program {kind}", flush=True)
    if kind == OTHER:
        print(RETRIEVAL)
    elif kind == RL and command[number - 1] in _ANSWERED_HERE:
        parsed = parse(command[number:], ("ppo_trainer", "ppo_megatron_trainer"))
        lines = [
            line
            for job in parsed.jobs()
            for line in servers_without_address(with_local_rows(parsed.load(job)))
        ]
        for line in dict.fromkeys(lines):
            print(line)
    elif kind != SFT:
        return subprocess.run([*command[:number], "--servers", *command[number:]], check=False).returncode
    return 0


def main(arguments: list[str]) -> int:
    try:
        return answer(arguments)
    except ValueError as error:
        print(f"error: {printable(error)}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
