"""Configurations for tests that need many: composed once, copied, and changed."""

import copy
from functools import cache

import yaml

from verl.config import Config, load_config, set_value


@cache
def _defaults() -> Config:
    return load_config([])


def config_with(*settings: str) -> Config:
    """The defaults with `key=value` settings, as `load_config` would give them for existing keys."""
    config = copy.deepcopy(_defaults())
    for setting in settings:
        key, _, value = setting.partition("=")
        set_value(config, key, yaml.safe_load(value))
    return config
