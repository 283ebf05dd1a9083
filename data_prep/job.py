"""Bring what a job needs, so that it runs without a network, and check it before it is submitted.

    search-r1 prepare [--out FILE] <the job's arguments>        scripts/prepare_job.sh, which calls this

    models, critic, teacher  (the run's settings)   --.
    encoder, reranker        (RETRIEVAL_ARGS)         +--> the hub's cache
    --model FLAG=NAME        (other programs)       --'
    corpus, index            (RETRIEVAL_ARGS)       -----> their paths, if they are Search-R1's Wikipedia's
    then the checks of a login node (verl.preflight --login) -> FILE, which the job reads as its JOB_SETUP

It asks the hub at HF_ENDPOINT, as all programs do. What is there is not fetched again.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from data_prep import wiki18
from data_prep.hub import fetch_model
from verl.preflight.__main__ import build_parser, check, target_of
from verl.utils.hub import is_hub_name
from verl.utils.text import printable

PATH_FLAGS = ("--corpus_path", "--index_path")


def fetch_models(models: dict[str, str]) -> None:
    """Bring models with hub names into the cache. Raises ValueError as `fetch_model` does."""
    for setting, model in models.items():
        if is_hub_name(model):
            folder = fetch_model(model, setting)
            print(f"{setting}={model}: {folder}", flush=True)


def fetch_retrieval_files(flags: Sequence[str]) -> None:
    """Bring the corpus and the indexes that flags of the retrieval server name and that are not there.

    Those of Search-R1's Wikipedia are known by the names of their files. Others are left to the checks.
    Raises ValueError as `wiki18.fetch` does.
    """
    assets = {target: name for name, (_, _, target) in wiki18.ASSETS.items()}
    words = [word for flag in flags for word in flag.split("=", 1)]
    for flag, value in zip(words, words[1:], strict=False):
        if flag not in PATH_FLAGS:
            continue
        for path in map(Path, filter(None, value.split(","))):
            if path.name in assets and not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                wiki18.fetch(assets[path.name], path.parent)
                print(f"{flag} {path}: fetched", flush=True)


def job_setup(own_setup: str | None) -> str:
    """Return the text of the file that a job reads on each of its nodes.

    Args:
        own_setup: The JOB_SETUP of the user, which is read first, or None.
    """
    from huggingface_hub import constants

    lines = ["# Written by `search-r1 prepare`: JOB_SETUP=<this file> sbatch ... runs without a network."]
    if own_setup:
        lines.append(f"source {shlex.quote(str(Path(own_setup).absolute()))}")
    cache = shlex.quote(str(Path(constants.HF_HUB_CACHE).absolute()))
    lines.append(f"export HF_HUB_OFFLINE=1 HF_HUB_CACHE={cache}")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; return the exit status, 2 if something is missing or would stop the job."""
    parser = build_parser()
    parser.prog = "search-r1 prepare"
    parser.add_argument("--out", type=Path, default=Path("prepared.sh"), help="the file that the job reads")
    arguments = parser.parse_intermixed_args(argv)
    arguments.login = True
    try:
        target = target_of(arguments)
        fetch_retrieval_files(target.retrieval_args)
        fetch_models(target.models_of_job)
        status = check(arguments)
        if status == 0:
            arguments.out.write_text(job_setup(os.environ.get("JOB_SETUP")), encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"error: {printable(error)}", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main())
