"""`python -m verl.doctor [options] [the run's overrides]`: checks before anything is spent.

    python -m verl.doctor                                      this machine, and the cluster at RAY_ADDRESS
    python -m verl.doctor trainer.nnodes=2 retriever.url=...   a run: the arguments of verl.trainer.main_ppo
    python -m verl.doctor --only retriever,proxy --json ...    some checks, for a script

One line for each finding: what is wrong, why it will hurt, what to type; then a note on the checks that had
nothing to look at, and the count of the others. Exit status: 0 nothing, or warnings only; 2 errors (also in
the arguments).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from verl.doctor.collect import collect
from verl.doctor.facts import Facts, from_json, to_json
from verl.doctor.facts_run import load_run
from verl.doctor.findings import Finding, as_json, num_errors
from verl.doctor.proxies import without_password
from verl.doctor.registry import CHECKS, chosen, diagnose, without_a_look
from verl.trainer.config.loading import CONFIG_NAME


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m verl.doctor",
        description="Checks before anything is spent. Arguments key=value are the run's overrides.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--config-name",
        default=CONFIG_NAME,
        help="the program's yaml file, e.g. sft_trainer (default: %(default)s)",
    )
    add("--json", action="store_true", help="print one JSON object")
    add("--quick", action="store_true", help="only what the trainer looks at when it starts")
    add("--only", type=_names, default=[], metavar="NAME,..", help="these checks alone")
    add("--skip", type=_names, default=[], metavar="NAME,..", help="not these")
    add("--list", action="store_true", help="print the names of the checks and what they find")
    add("--index_path", help="an index that the retrieval server is to load on this machine")
    add("--save_facts", metavar="FILE", help="keep what was seen (no keys, no passwords)")
    add("--facts", metavar="FILE", help="judge what was seen elsewhere, kept by --save_facts")
    add("overrides", nargs="*", metavar="key=value", help="as for the trainer")
    return parser


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def main(argv: Sequence[str] | None = None) -> int:
    """The program. Returns the exit status."""
    arguments = build_parser().parse_intermixed_args(argv)
    try:
        names = chosen(arguments.only, arguments.skip)
        if arguments.list:
            for name in names:
                print(f"{name:15} {CHECKS[name].about}")
            return 0
        facts = _facts(arguments)
        if arguments.save_facts:
            text = json.dumps(to_json(_without_passwords(facts)), indent=1)
            Path(arguments.save_facts).write_text(text + "\n", encoding="utf-8")
    except (ValueError, OSError) as error:
        if arguments.json:
            print(json.dumps({"error": str(error)}))
        print(f"error: {error}", file=sys.stderr)
        return 2
    findings = diagnose(facts, arguments.only, arguments.skip)
    if arguments.json:
        print(json.dumps(as_json(findings, names, without_a_look(facts, names)), indent=1))
    else:
        _print(findings, names, facts)
    return 2 if num_errors(findings) else 0


def _facts(arguments: argparse.Namespace) -> Facts:
    if arguments.facts:
        recorded = Path(arguments.facts).read_text(encoding="utf-8")
        try:
            facts: Facts = from_json(Facts, json.loads(recorded))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{arguments.facts} holds no facts that --save_facts wrote ({error})") from error
        return facts
    has_run = arguments.overrides or arguments.config_name != CONFIG_NAME
    run = load_run(arguments.overrides, arguments.config_name) if has_run else None
    return collect(run, quick=arguments.quick, index_path=arguments.index_path)


def _without_passwords(facts: Facts) -> Facts:
    """What stands in an address of the run's servers as user:password@ is left out."""
    if facts.run is None or not (urls := facts.run.get("retriever.url")):
        return facts
    urls = urls.split(",") if isinstance(urls, str) else urls
    spoken = ",".join(without_password(url.strip()) for url in urls)
    return replace(facts, run=replace(facts.run, settings=facts.run.settings | {"retriever.url": spoken}))


def _print(findings: list[Finding], names: list[str], facts: Facts) -> None:
    for finding in findings:
        print(finding.line)
    errors = num_errors(findings)
    of = "this machine" if facts.run is None else f"this run on {len(facts.machines)} machine(s)"
    if facts.run is None and facts.nodes:
        of = f"the {len(facts.nodes)} machine(s) of the cluster at RAY_ADDRESS"
    others = without_a_look(facts, names)
    if others:
        groups = [
            f"without {lack}: {', '.join(name for name in others if others[name] == lack)}"
            for lack in dict.fromkeys(others.values())
        ]
        print(f"note: {len(others)} checks had nothing to look at, {'; '.join(groups)}")
    looked = len(names) - len(others)
    print(f"{looked} checks of {of}: {errors} errors, {len(findings) - errors} warnings")
