"""A run whose processes need no Ray: `python -m verl.rl @ run.yaml [key=value ...]`.

See docs/async.md.
"""

import sys

from verl.trainer.main_ppo import run

if __name__ == "__main__":
    sys.exit(run([*sys.argv[1:], "trainer.backend=folder"]))
