"""The program `python -m verl.evaluation --model FOLDER --benchmarks FILE.parquet`.

See docs/evaluation.md.
"""

import sys

from verl.evaluation.program import main

if __name__ == "__main__":
    sys.exit(main())
