"""python -m verl.inference --model FOLDER: an engine behind HTTP.

python -m verl.inference @ run.yaml [--rank 0]: a process that samples for a run with trainer.backend=folder.
"""

from __future__ import annotations

import sys

from verl.train_worker import play
from verl.utils.announcing import without_collections

if __name__ == "__main__":
    given = sys.argv[1:]
    if any(each.startswith("@") or ("=" in each and not each.startswith("-")) for each in given):
        sys.exit(play("inference", given))
    with without_collections():
        from verl.inference.server import main  # the above sets what is read when torch is imported

    main()
