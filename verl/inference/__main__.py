"""Run an engine behind HTTP, or a process that samples for a run.

python -m verl.inference --model FOLDER             serves an engine behind HTTP
python -m verl.inference @ run.yaml [--rank 0]      samples for a run with trainer.backend=folder
"""

from __future__ import annotations

import sys

from verl.train_worker import run_process
from verl.utils.announcing import gc_paused

if __name__ == "__main__":
    given = sys.argv[1:]
    if any(word.startswith("@") or ("=" in word and not word.startswith("-")) for word in given):
        sys.exit(run_process("inference", given))
    with gc_paused():
        from verl.inference.server import main  # imports torch, which reads what the line above sets

    main()
