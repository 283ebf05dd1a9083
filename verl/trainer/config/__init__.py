"""The configuration of a run: command-line overrides -> `load_config` -> `validate` -> the trainer.

`ppo_trainer.yaml` holds every key with its default and meaning, `keys.py` says where each is read,
`loading.py` turns overrides into a configuration, `validation.py` finds a user's mistakes before
anything starts, by the types, choices and ranges in `limits.py`.
"""

from verl.trainer.config.loading import load_config, parse_arguments
from verl.trainer.config.validation import settings_without_effect, validate

__all__ = ["load_config", "parse_arguments", "settings_without_effect", "validate"]
