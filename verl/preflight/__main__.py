"""The command `python -m verl.preflight` (see verl/trainer/main_preflight.py)."""

import sys

from verl.trainer.main_preflight import main

sys.exit(main())
