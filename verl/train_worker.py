"""A process that trains: `python -m verl.train_worker @ run.yaml [--rank 0]`.

See docs/async.md.
"""

import argparse
import os
import sys
from collections.abc import Sequence


def run_process(program: str, argv: Sequence[str]) -> int:
    """Run a process of a run to its end; return the exit status.

    Args:
        program: name of the process for users.
        argv: arguments of the command line.
    """
    # Several processes share a machine's cores. This must be set before torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from verl.config.command_line import read_arguments
    from verl.trainer.processes import process_folder
    from verl.utils.announcing import gc_paused

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--address", default="127.0.0.1")
    parser.add_argument("--parent", type=int, default=0)
    options, run_arguments = parser.parse_known_args(argv)
    try:
        folder = process_folder(read_arguments(run_arguments).config)
        with gc_paused():
            from verl.single_controller.folder import serve  # imports torch, so a mistake is reported first

        return serve(folder, f"{program}-{options.rank}", options.address, options.parent)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(run_process("train_worker", sys.argv[1:]))
