"""The program `python -m verl.synthesize --model FOLDER --benchmarks FILE.parquet`.

See docs/synthesis.md.
"""

import sys

from verl.trainer.main_synthesize import main

if __name__ == "__main__":
    sys.exit(main())
