"""The configuration of a run: command line -> `load_config` (verl.config) -> `validate` -> the trainer."""

from verl.config import load_config
from verl.planning.config_validation import settings_without_effect, validate

__all__ = ["load_config", "settings_without_effect", "validate"]
