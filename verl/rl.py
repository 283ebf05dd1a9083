"""A whole run of named processes on Ray: `python -m verl.rl @ run.yaml [key=value ...]`.

The orchestrator, the trainers and the samplers are actors, on the cluster at RAY_ADDRESS or on one of this
machine that the command starts. See docs/async.md.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from verl.config.checks import check_config
from verl.config.command_line import read_arguments
from verl.data.remote_rows import with_local_rows
from verl.utils.logs import start_logging
from verl.utils.text import printable

ROLES = ("--trainer", "--orchestrator", "--inference")  # of PRIME-RL, whose roles have a file each


def run(arguments: Sequence[str]) -> int:
    """Run the program; return the exit status."""
    argv = [*arguments, "trainer.backend=ray"]
    try:
        for flag in ROLES:
            if flag in argv:
                raise ValueError(
                    f"Found {flag}; expected one configuration for all roles: python -m verl.rl @ run.yaml "
                    "[@ more.yaml] [key=value ...]"
                )
        config = with_local_rows(read_arguments(argv)).config
        check_config(config)
    except ValueError as error:
        print(f"error: {printable(error)}", file=sys.stderr)
        return 2
    if config.trainer.dry_run:  # a plan, for which nothing is started
        from verl.trainer import main_ppo

        return main_ppo.run(argv)
    from verl.trainer.orchestrator import OrchestratedRun

    return OrchestratedRun(argv, config).run()


if __name__ == "__main__":
    start_logging("rl")
    sys.exit(run(sys.argv[1:]))
