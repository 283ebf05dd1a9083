"""python -m verl.orchestrator @ run.yaml: drives a run whose processes others start (docs/async.md)."""

import sys

from verl.trainer.main_ppo import run

if __name__ == "__main__":
    sys.exit(run([*sys.argv[1:], "trainer.backend=folder"], starts_processes=False))
