"""Check arguments without torch, and write the files that are made from the schema.

python -m verl.config ppo_trainer key=value ...   exit with 0 if a run accepts these arguments, else with 2
python -m verl.config --check                     check that the files made from the schema are up to date
python -m verl.config                             write them
"""

from __future__ import annotations

import sys
from pathlib import Path

from verl.config.checks import check_config, check_sft_config
from verl.config.command_line import parse, show
from verl.config.loading import PROGRAMS
from verl.config.render import json_schema, yaml_file
from verl.utils.text import printable

ROOT = Path(__file__).resolve().parents[2]


def generated_files() -> dict[Path, str]:
    """Return the content of each file that is made from the schema."""
    folder = ROOT / "verl" / "trainer" / "config"
    readable = {folder / f"{name}.yaml": yaml_file(name) for name in ("ppo_trainer", "sft_trainer")}
    return {**readable, ROOT / "configs" / "schema.json": json_schema()}


def check_arguments(name: str, arguments: list[str]) -> int:
    """Return 0 if a program accepts these arguments, of each job of a sweep, else 2.

    Its data may not have been made yet.
    """
    names = ("sft_trainer",) if name == "sft_trainer" else ("ppo_trainer", "ppo_megatron_trainer")
    try:
        command = parse(arguments, names)
        for job in command.jobs():
            loaded = command.load(job)
            if command.shown:
                show(command, loaded)
            elif name == "sft_trainer":
                check_sft_config(loaded.config, with_data=False)
            else:
                check_config(loaded.config, with_data=False)
    except ValueError as error:
        print(f"error: {printable(error)}", file=sys.stderr)
        return 2
    return 0


def main() -> int:
    arguments = sys.argv[1:]
    if arguments and arguments[0] in PROGRAMS:
        return check_arguments(arguments[0], arguments[1:])
    if arguments not in ([], ["--check"]):
        expected = f"nothing, --check, or one of {', '.join(PROGRAMS)} and settings"
        print(f"error: found {' '.join(arguments)}; expected {expected}", file=sys.stderr)
        return 2
    stale = [
        p for p, text in generated_files().items() if not p.is_file() or p.read_text(encoding="utf-8") != text
    ]
    if arguments == ["--check"]:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is not what the schema says; run python -m verl.config")
        return 1 if stale else 0
    for path in stale:
        path.parent.mkdir(exist_ok=True)
        path.write_text(generated_files()[path], encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
