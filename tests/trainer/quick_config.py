"""Configurations for tests that need many: composed once, copied, and changed."""

import copy
from functools import cache

import yaml
from omegaconf import DictConfig, OmegaConf

from verl.trainer.config import load_config


@cache
def _defaults() -> DictConfig:
    return load_config([])


def config_with(*settings: str) -> DictConfig:
    """The defaults with `key=value` settings, as `load_config` would give them for existing keys."""
    config = copy.deepcopy(_defaults())
    for setting in settings:
        key, _, value = setting.partition("=")
        OmegaConf.update(config, key, yaml.safe_load(value))
    return config
