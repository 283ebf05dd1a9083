"""The configuration of a run; each key is declared once, in `schema.py`, `policy.py` or `environments.py`."""

from verl.config.keys import Block, at, flat, put, to_dict
from verl.config.loading import PROGRAMS, Loaded, load, load_config, load_sft_config
from verl.config.render import read_yaml, write_yaml
from verl.config.schema import Config, SFTConfig

__all__ = [
    "PROGRAMS",
    "Block",
    "Config",
    "Loaded",
    "SFTConfig",
    "at",
    "flat",
    "load",
    "load_config",
    "load_sft_config",
    "put",
    "read_yaml",
    "to_dict",
    "write_yaml",
]
