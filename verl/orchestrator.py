"""python -m verl.orchestrator @ run.yaml: the driver of a run with trainer.backend=folder.

Its processes are started by others; see verl/train_worker.py and docs/async.md.
"""

import sys

from verl.trainer.main_ppo import run

if __name__ == "__main__":
    sys.exit(run([*sys.argv[1:], "trainer.backend=folder"], starts_processes=False))
