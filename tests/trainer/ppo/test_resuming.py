"""The settings that all checkpoints of a run share are in the name that the scripts give it."""

from __future__ import annotations

import subprocess
from pathlib import Path

from verl.config import load_config
from verl.config.keys import flatten
from verl.trainer.ppo.resuming import DECISIVE

SCRIPT = Path(__file__).parents[3] / "scripts" / "run_training.sh"


def test_the_name_that_the_scripts_give_a_run_tells_all_settings_apart_which_a_checkpoint_must_share():
    """Otherwise a run with other settings finds the checkpoints of the first one, and is refused."""
    blocks = tuple(f"{key}." for key in DECISIVE)
    keys = [key for key in flatten(load_config([])) if f"{key}.".startswith(blocks)]
    loop = 'source "$1"; shift; for key; do overrides_label "$key=7"; done'
    line = ["bash", "-c", loop, "bash", str(SCRIPT), *keys]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    labels = dict(zip(keys, done.stdout.splitlines(), strict=True))
    assert [key for key, label in labels.items() if not label] == []
