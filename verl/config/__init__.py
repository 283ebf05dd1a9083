"""The configuration of a run; each key is declared once, in `schema.py`, `policy.py` or `environments.py`."""

from verl.config.keys import Block, flatten, get_value, replace_values, to_dict
from verl.config.loading import PROGRAMS, Loaded, load, load_config, load_sft_config
from verl.config.render import read_yaml, write_yaml
from verl.config.schema import Config, SFTConfig

__all__ = [
    "PROGRAMS",
    "Block",
    "Config",
    "Loaded",
    "SFTConfig",
    "flatten",
    "get_value",
    "load",
    "load_config",
    "load_sft_config",
    "read_yaml",
    "replace_values",
    "to_dict",
    "write_yaml",
]
