"""Checks that every program's configuration shares: types, choices and ranges by tables, files, places.

A program (reinforcement learning, supervised training) has one yaml file and one `KeyTables`; what one of its
keys means for another is in its own module. Each check raises ValueError with what was found, what was
expected and what to do.
"""

import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from verl.trainer.config.loading import flat

LOGGERS = ("console", "wandb", "tensorboard", "mlflow")
_TYPE_NAMES: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list [a,b]",
    dict: "a dictionary {key: value}",
}


@dataclass(frozen=True)
class KeyTables:
    """What the keys of one yaml file may hold.

    Attributes:
        load: overrides -> configuration; without overrides it gives the defaults, whose types count.
        nullable: keys that may be null, with the types that they may have otherwise.
        choices: key -> its values. importable: of these, keys that may name a function of the user's own,
            package.module:function.
        ranges: key -> (smallest, largest, the same in words); null values are not looked at.
        fixed: key -> why it may only keep its default.
        no_effect: key -> why any (valid) value of it changes nothing.
        follows: fixed key -> the key whose value is its default.
        types: key that may be of other types than its default -> these types.
    """

    load: Callable[[Sequence[str]], DictConfig]
    nullable: Mapping[str, tuple[type, ...]]
    choices: Mapping[str, tuple[Any, ...]]
    ranges: Mapping[str, tuple[float, float, str]]
    fixed: Mapping[str, str]
    no_effect: Mapping[str, str]
    follows: Mapping[str, str] = field(default_factory=dict)
    types: Mapping[str, tuple[type, ...]] = field(default_factory=dict)
    importable: Sequence[str] = ()

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """Dotted name -> value when nothing is set."""
        return flat(self.load([]))

    def check(self, values: Mapping[str, Any]) -> None:
        """Types, choices, ranges and fixed keys of a configuration that `flat` has flattened."""
        self._check_types(values)
        self._check_choices(values)
        self._check_ranges(values)
        self._check_fixed(values)

    def without_effect(self, config: DictConfig, more: Mapping[str, str] | None = None) -> list[str]:
        """A line for each key of `no_effect` and `more` that is set to something else than its default."""
        return [
            f"{key}={OmegaConf.select(config, key)} has no effect: {reason}"
            for key, reason in {**self.no_effect, **(more or {})}.items()
            if OmegaConf.select(config, key) != self.defaults[key]
        ]

    def _check_types(self, values: Mapping[str, Any]) -> None:
        for key, default in self.defaults.items():
            value = values[key]
            expected = self.nullable.get(key) or self.types.get(key) or (type(default),)
            if value is None and key in self.nullable:
                continue
            if float in expected:
                expected = (*expected, int)
            is_bool_mistake = isinstance(value, bool) and bool not in expected
            if not isinstance(value, expected) or is_bool_mistake:
                names = [_TYPE_NAMES[t] for t in expected] + (["null"] if key in self.nullable else [])
                raise ValueError(f"Found {key}={value!r}; expected {' or '.join(dict.fromkeys(names))}.")

    def _check_choices(self, values: Mapping[str, Any]) -> None:
        for key, choices in self.choices.items():
            if key in self.importable and ":" in values[key]:
                _check_importable(key, values[key])
            elif values[key] not in choices:
                names = ", ".join("null" if c is None else str(c) for c in choices)
                own = ", or your own as package.module:function" if key in self.importable else ""
                raise ValueError(f"Found {key}={values[key]}; expected one of: {names}{own}.")

    def _check_ranges(self, values: Mapping[str, Any]) -> None:
        for key, (low, high, text) in self.ranges.items():
            if values[key] is not None and not low <= values[key] <= high:
                raise ValueError(f"Found {key}={values[key]}; expected {text}.")

    def _check_fixed(self, values: Mapping[str, Any]) -> None:
        for key, reason in self.fixed.items():
            # A default that follows another key is compared with what it follows in this configuration.
            default = values[self.follows[key]] if key in self.follows else self.defaults[key]
            if values[key] != default:
                raise ValueError(f"Found {key}={values[key]}; expected {default}. {reason}")


def _check_importable(key: str, path: str) -> None:
    """That there is such a module; the function is looked for when it is first used."""
    module, _, name = path.partition(":")
    try:
        is_there = name.isidentifier() and importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        is_there = False
    if not is_there:
        raise ValueError(
            f"Found {key}={path}; expected package.module:function of a module that can be imported from "
            "where the run is started."
        )


def check_betas(key: str, betas: Sequence[Any]) -> None:
    """AdamW's two decay rates."""
    if len(betas) != 2 or not all(isinstance(b, float | int) and 0 <= b < 1 for b in betas):
        raise ValueError(f"Found {key}={betas}; expected two numbers in [0, 1).")


def check_loggers(names: Iterable[str]) -> None:
    """`trainer.logger`: known names, whose packages are installed."""
    for name in names:
        if name not in LOGGERS:
            raise ValueError(f"Found {name!r} in trainer.logger; expected any of: {', '.join(LOGGERS)}.")
        if name in ("wandb", "mlflow", "tensorboard") and importlib.util.find_spec(name) is None:
            raise ValueError(
                f"Found {name!r} in trainer.logger, but the package is not installed; "
                f"run `pip install {name}` or leave it out."
            )


def check_parquet(config: DictConfig, key: str) -> None:
    """A key that names a parquet file, or a list of them."""
    for path in as_list(OmegaConf.select(config, key)):
        if path is None:
            raise ValueError(f"Found no {key}; expected a parquet file. Set {key}=<path>.parquet.")
        if not Path(path).is_file():
            raise ValueError(f"Found no file at {key}={path}; expected a parquet file.")


def check_model(key: str, path: str | None) -> None:
    """A folder with a config.json, or the name of a model on the Hugging Face hub (`owner/name`)."""
    if path is None:
        raise ValueError(f"Found no {key}; expected a Hugging Face model folder. Set {key}=<folder>.")
    folder = Path(path)
    looks_like_hub_name = path.count("/") == 1 and path[0] not in "./" and not folder.parent.is_dir()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            is_adapter = (folder / "adapter_config.json").is_file()
            hint = " A LoRA adapter goes into model.lora_adapter_path." if is_adapter else ""
            raise ValueError(
                f"Found {key}={path} without a config.json; expected a Hugging Face folder.{hint}"
            )
    elif not looks_like_hub_name:
        raise ValueError(
            f"Found no folder at {key}={path}; expected a Hugging Face model folder, or a model's name "
            "on the hub such as Qwen/Qwen2.5-3B."
        )


def check_adapters(key: str, model: DictConfig) -> None:
    """LoRA in the model block `key`: its package is installed, and an adapter to go on from is there."""
    path = model.get("lora_adapter_path")
    if path is not None and not (Path(path) / "adapter_config.json").is_file():
        raise ValueError(
            f"Found no adapter_config.json at {key}.lora_adapter_path={path}; expected the folder of a PEFT "
            "adapter, such as <default_local_dir>/global_step_100/actor/adapter."
        )
    if (path is not None or model.lora_rank > 0) and importlib.util.find_spec("peft") is None:
        raise ValueError(
            f"Found {key}.lora_rank or lora_adapter_path, but the package peft is not installed; run "
            "`pip install peft`, or set lora_rank=0."
        )


def check_resume(trainer: DictConfig) -> None:
    """`trainer.resume_mode` and `trainer.resume_from_path` fit together."""
    if trainer.resume_mode != "from_path" and trainer.resume_from_path is not None:
        raise ValueError(
            f"Found trainer.resume_from_path={trainer.resume_from_path} with trainer.resume_mode="
            f"{trainer.resume_mode}; expected resume_mode=from_path."
        )
    if trainer.resume_mode == "from_path":
        path = trainer.resume_from_path
        if path is None or not Path(path).is_dir():
            raise ValueError(
                f"Found trainer.resume_from_path={path}, not a folder; expected the folder of one step, "
                "such as <default_local_dir>/global_step_100."
            )


def check_processes(trainer: DictConfig) -> None:
    """How many GPUs there are is the entry point's to check: only it knows the cluster."""
    processes = trainer.nnodes * trainer.n_gpus_per_node
    if trainer.backend == "local" and processes > 1:
        raise ValueError(
            f"Found trainer.backend=local with {processes} processes; expected trainer.backend=ray, or "
            "trainer.nnodes=1 trainer.n_gpus_per_node=1."
        )


def as_list(value: Any) -> list[Any]:
    """One value or a list of them, as a list."""
    return list(value) if isinstance(value, list | ListConfig) else [value]
