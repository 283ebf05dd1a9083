"""The driver of a run whose processes others start: `python -m verl.orchestrator @ run.yaml`.

See docs/async.md.
"""

import sys

from verl.trainer.main_ppo import run

if __name__ == "__main__":
    sys.exit(run([*sys.argv[1:], "trainer.backend=folder"], starts_processes=False))
