"""Command-line overrides (Hydra's grammar) -> one resolved configuration.

    ["trainer.seed=1", "+trainer.val_only=true", ...] -> check the keys -> Hydra's compose -> DictConfig

The keys are checked here, not by Hydra, so that a misspelt key names its nearest neighbour, `+key`
works for a key that already exists (Search-R1's scripts need that), and a repeated key is no error.
"""

import difflib
import math
import re
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

CONFIG_DIR = Path(__file__).resolve().parent
CONFIG_NAME = "ppo_trainer"
# Below these keys a user may add what they like: the values go to the model's own configuration, or to vLLM.
OPEN_KEYS = (
    "actor_rollout_ref.model.override_config",
    "critic.model.override_config",
    "actor_rollout_ref.rollout.vllm.engine_args",
    "model.override_config",
    "data.apply_chat_template_kwargs",
)


def flat(config: DictConfig | dict[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted name -> value, as plain python, of a configuration in file order; interpolations as written."""
    plain = OmegaConf.to_container(config, resolve=False) if isinstance(config, DictConfig) else config
    assert isinstance(plain, dict)
    values: dict[str, Any] = {}
    for name, value in plain.items():
        key = prefix + str(name)
        values |= flat(value, key + ".") if isinstance(value, dict) and key not in OPEN_KEYS else {key: value}
    return values


@cache
def known_keys(config_name: str = CONFIG_NAME) -> tuple[str, ...]:
    """Every key that a command line may set."""
    return tuple(flat(_read_yaml(config_name)))


def load_config(
    overrides: Sequence[str],
    config_name: str = CONFIG_NAME,
    resolve_with: Callable[[DictConfig], None] | None = None,
) -> DictConfig:
    """Compose the configuration from its defaults and the overrides.

    Args:
        overrides: `key=value`, `+key=value` or `++key=value`; of a repeated key the last one counts.
        config_name: name of the yaml file beside this module, without its ending.
        resolve_with: fills in that file's aliases; None: `resolve`.

    Returns:
        The configuration with interpolations, `~` in paths and null aliases (`resolve`) filled in;
        reading a key that does not exist raises. Run `validate` on it before it is used.

    Raises:
        ValueError: an override cannot be read or names an unknown key.
    """
    known = known_keys(config_name)
    last: dict[str, str] = {}
    for text in overrides:
        override = _parse(text)
        for key, value in _flatten(override):
            _check_key(key, known, text)
            last.pop(key, None)  # the order of the last mentions is kept
            last[key] = f"++{key}={value}"
    with initialize_config_dir(config_dir=str(CONFIG_DIR), version_base="1.3"):
        config = compose(config_name=config_name, overrides=list(last.values()))
    (resolve_with or resolve)(config)
    OmegaConf.set_struct(config, True)
    return config


def resolve(config: DictConfig) -> None:
    """Fill in, in place, what is written as an alias or left null because it follows other keys.

    A micro-batch of one process (`*_per_gpu`) follows the whole run's micro-batch size:
    `size // processes`, at least 1; on Megatron, where processes share a micro-batch, `size // replicas`.
    """
    OmegaConf.resolve(config)
    replicas = max(1, as_int(config.trainer.nnodes) * as_int(config.trainer.n_gpus_per_node))
    if config.actor_rollout_ref.actor.strategy == "megatron":
        replicas = max(1, replicas // _sharing(config.actor_rollout_ref.actor.megatron))
    actor, critic = config.actor_rollout_ref.actor, config.critic
    for block, name in (
        (actor, "ppo_micro_batch_size"),
        (config.actor_rollout_ref.ref, "log_prob_micro_batch_size"),
        (config.actor_rollout_ref.rollout, "log_prob_micro_batch_size"),
        (critic, "ppo_micro_batch_size"),
        (critic, "forward_micro_batch_size"),
    ):
        if block[f"{name}_per_gpu"] is None and isinstance(block[name], int):
            block[f"{name}_per_gpu"] = max(1, block[name] // replicas) if block[name] > 0 else block[name]
    if config.trainer.val_before_train is None:
        config.trainer.val_before_train = True
    if config.trainer.val_only is None:
        config.trainer.val_only = False
    expand_paths(
        config,
        (
            "data.train_files",
            "data.val_files",
            "data.extra_val_files",
            "actor_rollout_ref.model.path",
            "actor_rollout_ref.model.lora_adapter_path",
            "actor_rollout_ref.teacher.path",
            "actor_rollout_ref.rollout.vllm.python",
            "critic.model.path",
            "critic.model.tokenizer_path",
            "custom_reward_function.path",
            "retriever.corpus_path",
            "trainer.default_local_dir",
            "trainer.resume_from_path",
        ),
    )
    vllm = config.actor_rollout_ref.rollout.vllm
    if isinstance(vllm.python, str) and "/" in vllm.python:  # workers may have another working directory
        vllm.python = str(Path(vllm.python).absolute())


def _sharing(megatron: DictConfig) -> int:
    """Processes that share a replica of the model."""
    kinds = ("tensor_model", "pipeline_model", "context")
    return max(1, math.prod(as_int(megatron[f"{kind}_parallel_size"]) for kind in kinds))


def parse_arguments(
    argv: Sequence[str],
    config_name: str = CONFIG_NAME,
    resolve_with: Callable[[DictConfig], None] | None = None,
) -> DictConfig:
    """`load_config` for a program: `--help` prints every key with its meaning, `--print` the result.

    Raises:
        ValueError: as `load_config`.
        SystemExit: with code 0 after `--help` or `--print`.
    """
    if "--help" in argv or "-h" in argv:
        for name in _layers(config_name):
            print((CONFIG_DIR / f"{name}.yaml").read_text(encoding="utf-8"))
        sys.exit(0)
    config = load_config([a for a in argv if a != "--print"], config_name, resolve_with)
    if "--print" in argv:
        print(OmegaConf.to_yaml(config))
        sys.exit(0)
    return config


def take_config_name(argv: Sequence[str]) -> tuple[str, list[str]]:
    """(name of the yaml file, the other arguments) of `--config-name NAME` or `--config-name=NAME`; without
    it: CONFIG_NAME. The last one counts.

    Raises:
        ValueError: no name follows.
    """
    name, rest, arguments = CONFIG_NAME, [], list(argv)
    while arguments:
        argument = arguments.pop(0)
        option, equals, value = argument.partition("=")
        if option != "--config-name":
            rest.append(argument)
            continue
        if not equals and not arguments:
            raise ValueError(f"Found --config-name without a name; expected for example {CONFIG_NAME}.")
        name = (value if equals else arguments.pop(0)).removesuffix(".yaml")
    return name, rest


def nearest_keys(key: str, known: Sequence[str], count: int = 3) -> list[str]:
    """The known keys that look most like `key`, best first; a missing front part is no difference."""
    parts = key.count(".") + 1

    def likeness(candidate: str) -> tuple[float, float]:
        tail = ".".join(candidate.split(".")[-parts:])
        ratios = [difflib.SequenceMatcher(None, key, text).ratio() for text in (candidate, tail)]
        last = difflib.SequenceMatcher(None, key.split(".")[-1], candidate.split(".")[-1]).ratio()
        return max(ratios) + 0.5 * last, ratios[0]

    return sorted(known, key=likeness, reverse=True)[:count]


def _read_yaml(config_name: str) -> DictConfig:
    """A file beside this module, with what it is laid over."""
    merged = OmegaConf.create()
    for name in reversed(_layers(config_name)):
        merged.merge_with(_read_layer(name))
    merged.pop("defaults", None)
    return merged


def _layers(config_name: str) -> list[str]:
    """The file's name, and the one that it is laid over (the first of its `defaults`), if there is one."""
    defaults = _read_layer(config_name).get("defaults")
    return [config_name] if defaults is None else [config_name, defaults[0]]


def _read_layer(config_name: str) -> DictConfig:
    path = CONFIG_DIR / f"{config_name}.yaml"
    if not path.is_file():
        names = ", ".join(sorted(p.stem for p in CONFIG_DIR.glob("*.yaml")))
        raise ValueError(f"Found no configuration named {config_name!r}; expected one of: {names}.")
    config = OmegaConf.load(path)
    assert isinstance(config, DictConfig)
    return config


def _check_variable(text: str) -> None:
    """Refuses what looks like an environment variable: no key is in capitals."""
    name, equals, value = text.lstrip("+").partition("=")
    if equals and re.fullmatch("[A-Z][A-Z0-9_]+", name):
        raise ValueError(
            f"Found the unknown key {name!r} in {text!r}. An environment variable goes before the command: "
            f"{name}={value} bash <the script> ... --help lists all keys."
        )


def _parse(text: str) -> Override:
    _check_variable(text)
    if text.startswith("-"):
        raise ValueError(f"Found the option {text!r}; expected key=value. --help lists the keys.")
    key, equals, value = text.partition("=")
    if value.startswith("~"):  # a home folder that the shell left as it is; Hydra cannot read it bare
        text = f"{key}='{value}'"
    if not equals and not text.startswith("~"):
        raise ValueError(f"Found {text!r}; expected key=value.")
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"Could not read {text!r}: {reason}. Put a value with special characters in quotes that "
            f"reach the program, for example {key}='\"...\"'."
        ) from error
    if override.is_delete():
        name = override.key_or_group
        raise ValueError(f"Found {text!r}; a key cannot be removed. Set {name}=null or leave it out.")
    if override.is_sweep_override():
        raise ValueError(f"Found {text!r}, a sweep; expected one value. A list is written {key}=[a,b].")
    return override


def _flatten(override: Override) -> list[tuple[str, str]]:
    """(key, value as text) pairs; a dictionary value counts as one pair for each of its entries."""
    key, value = override.key_or_group, override.value()
    if not isinstance(value, dict) or key in OPEN_KEYS:
        return [(key, override.get_value_element_as_str())]
    return [
        pair
        for name, item in value.items()
        for pair in _flatten(Override(override.type, f"{key}.{name}", override.value_type, item))
    ]


def _check_key(key: str, known: Sequence[str], text: str) -> None:
    if key in known or any(key.startswith(open_key + ".") for open_key in OPEN_KEYS):
        return
    if key.split(".")[0] == "hydra":
        raise ValueError(
            f"Found {text!r}; the program writes nothing through Hydra, so hydra.* keys are not taken. "
            "The run's folder is trainer.default_local_dir."
        )
    if any(k.startswith(key + ".") for k in known):
        inside = ", ".join(k for k in known if k.startswith(key + "."))
        raise ValueError(f"Found {text!r}, but {key} is a group of keys; expected one of: {inside}.")
    first, *others = nearest_keys(key, known)
    raise ValueError(
        f"Found the unknown key {key!r} in {text!r}. The nearest known key is {first!r}"
        f" (then {', '.join(others)}). --help lists all keys."
    )


def expand_paths(config: DictConfig, keys: Sequence[str]) -> None:
    """Fill in, in place, the home folder for `~` in the paths of these keys."""
    for key in keys:
        OmegaConf.update(config, key, _expand(OmegaConf.select(config, key)))


def absolute_folders(config: DictConfig, keys: Sequence[str]) -> None:
    """Make the folders of these keys absolute, in place: workers may have another working directory. What is
    no folder here (null, a name on the hub) stays."""
    for key in keys:
        value = OmegaConf.select(config, key)
        if value is not None and Path(value).is_dir():
            OmegaConf.update(config, key, str(Path(value).absolute()))


def _expand(value):
    if isinstance(value, str):
        return str(Path(value).expanduser()) if value.startswith("~") else value
    if OmegaConf.is_list(value):
        return [_expand(item) for item in value]
    return value


def as_int(value: object) -> int:
    """The number, or 1 for what `validate` will refuse."""
    return value if isinstance(value, int) else 1
