"""The program `python -m verl.evaluate --model FOLDER --benchmarks FILE.parquet`.

See docs/evaluation.md.
"""

import sys

from verl.trainer.main_evaluate import main

if __name__ == "__main__":
    sys.exit(main())
