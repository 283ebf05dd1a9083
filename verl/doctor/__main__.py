"""`python -m verl.doctor`: see command.py."""

import sys

from verl.doctor.command import main

sys.exit(main())
