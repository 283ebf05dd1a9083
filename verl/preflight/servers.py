"""Say which servers a run asks that nobody has given an address for: `python -m verl.preflight.servers`.

    python -m verl.preflight.servers KEY=VALUE... @FILE...     the arguments of a run

Prints "retrieval" if rows of the run search and no layer of its settings names `retriever.url`, else nothing.
The environments are those of the rows, so the rows must be there. It needs no torch.
"""

from __future__ import annotations

import sys

from verl.config.command_line import parse
from verl.config.loading import Loaded
from verl.data.row_environments import searches
from verl.utils.text import printable


def servers_without_address(loaded: Loaded) -> list[str]:
    """Return the names of the servers that a run asks and that its settings give no address for."""
    is_given = loaded.origins["retriever.url"] != "default"
    return ["retrieval"] if not is_given and searches(loaded.config) else []


def main(arguments: list[str]) -> int:
    try:
        command = parse(arguments, ("ppo_trainer", "ppo_megatron_trainer"))
        needed = {name for job in command.jobs() for name in servers_without_address(command.load(job))}
    except ValueError as error:
        print(f"error: {printable(error)}", file=sys.stderr)
        return 2
    for name in sorted(needed):
        print(name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
