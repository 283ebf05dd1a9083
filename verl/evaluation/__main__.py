"""The program `python -m verl.evaluation --model FOLDER --benchmarks FILE.parquet`.

See docs/evaluation.md.
"""

import sys

from verl.evaluation.program import main
from verl.utils.logs import start_logging

if __name__ == "__main__":
    start_logging("evaluation")
    sys.exit(main())
