"""Configurations for tests that need many: composed once, and others derived from it."""

from functools import cache

import yaml

from verl.config import Config, load_config, replace_values


@cache
def _defaults() -> Config:
    return load_config([])


def config_with(*settings: str) -> Config:
    """The defaults with `key=value` settings, as `load_config` would give them for existing keys."""
    pairs = (setting.partition("=") for setting in settings)
    return replace_values(_defaults(), {key: yaml.safe_load(value) for key, _, value in pairs})
