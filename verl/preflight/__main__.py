"""Checks before anything is spent: `python -m verl.preflight [options] [the run's overrides]`.

    python -m verl.preflight                                     this machine, and the cluster at RAY_ADDRESS
    python -m verl.preflight trainer.nnodes=2 retriever.url=...  a run: the arguments of verl.trainer.main_ppo
    python -m verl.preflight --only retriever,proxy --json ...   some checks, for a script
    python -m verl.preflight --login trainer.nnodes=2 ...        a job before it is submitted (RETRIEVAL_ARGS)

Each finding is one line that says what is wrong, why it will hurt and what to type. The exit status is 0 if
there is nothing, or warnings only, and 2 if there are errors (also in the arguments).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence

from verl.config import PROGRAMS, Loaded, load
from verl.config.overrides import Folders
from verl.data.remote_rows import with_local_rows
from verl.plugins import hook
from verl.preflight.preflight import CHECKS, choose, run_preflight
from verl.preflight.target import Target, exclude_line
from verl.utils.logs import start_logging
from verl.utils.text import printable


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m verl.preflight",
        description="Checks before anything is spent. Arguments key=value are the run's overrides.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    name_help = f"primary file: {', '.join(PROGRAMS)}, or one of your own (default: %(default)s)"
    add("--config-name", "-cn", default="ppo_trainer", metavar="NAME", help=name_help)
    add("--config-dir", "-cd", metavar="DIR", help="a folder with files of your own, as for the trainer")
    add("--config-path", "-cp", metavar="DIR", help="the folder of the primary files, as for the trainer")
    add("--json", action="store_true", help="print one JSON object")
    add("--quick", action="store_true", help="only what the trainer looks at when it starts")
    add("--only", type=_names, default=[], metavar="NAME,..", help="these checks alone")
    add("--skip", type=_names, default=[], metavar="NAME,..", help="not these")
    add("--list", action="store_true", help="print the names of the checks and what they find")
    add("--login", action="store_true", help="only what a machine can know that submits the run as a job")
    model_help = "a further model of the job"
    add("--model", type=_flag_and_model, action="append", default=[], metavar="FLAG=NAME", help=model_help)
    add("--index_path", help="an index that the retrieval server is to load on this machine")
    add("overrides", nargs="*", metavar="key=value", help="as for the trainer")
    return parser


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _flag_and_model(text: str) -> tuple[str, str]:
    flag, _, model = text.partition("=")
    return flag, model


def target_of(arguments: argparse.Namespace) -> Target:
    """Return the target that the arguments of `build_parser` name.

    Raises ValueError or OSError if the run's settings can't be read.
    """
    name = arguments.config_name.removesuffix(".yaml")
    program = name if name in PROGRAMS else "ppo_trainer"
    folders = Folders(arguments.config_path, arguments.config_dir)
    loaded = Loaded(None, {}, [])
    if arguments.overrides or name != "ppo_trainer" or folders != Folders():
        loaded = with_local_rows(load(arguments.overrides, name, program_name=program, folders=folders))
    retrieval_args = os.environ.get("RETRIEVAL_ARGS", "") if arguments.login else ""
    folder = os.environ.get("RETRIEVAL_ENV")
    return Target(
        loaded.config,
        hook("retrieval_probe")(),
        arguments.index_path,
        is_thorough=not arguments.quick,
        notes=tuple(loaded.notes),
        at_login=arguments.login,
        retrieval_args=tuple(retrieval_args.split()),
        retrieval_python=f"{folder}/bin/python" if folder else sys.executable,
        more_models=dict(arguments.model),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; return the exit status."""
    return check(build_parser().parse_intermixed_args(argv))


def check(arguments: argparse.Namespace) -> int:
    """Make the checks that the arguments of `build_parser` ask for; return the exit status."""
    try:
        if arguments.list:
            for name in choose(arguments.only, arguments.skip):
                print(f"{name:15} {(CHECKS[name].__doc__ or '').splitlines()[0]}")
            return 0
        target = target_of(arguments)
        preflight = run_preflight(target, arguments.only, arguments.skip)
    except (ValueError, OSError) as error:
        if arguments.json:
            print(json.dumps({"error": str(error)}))
        print(f"error: {printable(error)}", file=sys.stderr)
        return 2
    errors = preflight.num_errors
    warnings = len(preflight.findings) - preflight.num_errors
    if arguments.json:
        findings = [dataclasses.asdict(finding) for finding in preflight.findings]
        counts = {"errors": errors, "warnings": warnings, "checks": preflight.checks}
        print(json.dumps({**counts, "findings": findings}, indent=1))
    else:
        for finding in preflight.findings:
            print(printable(finding.line))
        if line := exclude_line(preflight.findings):
            print(printable(line))
        machines = f"{preflight.num_machines} machine{'s' * (preflight.num_machines > 1)}"
        scope = f"this machine, or the cluster at RAY_ADDRESS: {machines}"
        if target.at_login:
            scope = "this job"
        elif target.config is not None:
            scope = f"this run on {machines}"
        print(f"{len(preflight.checks)} checks of {scope}: {errors} errors, {warnings} warnings")
    return 2 if errors else 0


if __name__ == "__main__":
    start_logging("preflight")
    sys.exit(main())
