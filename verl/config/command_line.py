"""A program's arguments: keys, files of keys, and the options that print the configuration and end."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from verl.config.keys import settable
from verl.config.loading import PROGRAMS, Loaded, load
from verl.config.render import to_yaml

OPTIONS = """\
--help              this list, with the values that the other arguments give
--print             these values, without their meaning; --print --origins: where each comes from
--config-name NAME  start from other defaults: {names}
@ FILE              keys from a .yaml or .toml file; of several files the later ones win
Layers, the weakest first: defaults, environment (VERL__TRAINER__SEED=1), files, key=value."""


def read_arguments(
    argv: Sequence[str], names: Sequence[str] = ("ppo_trainer", "ppo_megatron_trainer")
) -> Loaded:
    """The configuration that the arguments ask for.

    Args:
        names: of the configurations that the program takes; the first one is meant without `--config-name`.

    Raises:
        ValueError: an argument can't be read; see `load`.
        SystemExit: with code 0 after `--help` or `--print`.
    """
    name, rest = take_config_name(argv, names[0])
    if name not in names:
        raise ValueError(f"Found --config-name {name}; expected one of: {', '.join(names)}.")
    flags = {flag for flag in rest if flag in ("--help", "-h", "--print", "--origins")}
    loaded = load([argument for argument in rest if argument not in flags], name)
    if flags & {"--help", "-h"}:
        print(OPTIONS.format(names=", ".join(names)))
        print(to_yaml(name, loaded))
        sys.exit(0)
    if flags:
        print(to_yaml(name, loaded, with_origins="--origins" in flags, with_meaning=False))
        print(f"# {len(settable(PROGRAMS[name].schema))} keys")
        sys.exit(0)
    return loaded


def take_config_name(argv: Sequence[str], default: str = "ppo_trainer") -> tuple[str, list[str]]:
    """(name of the configuration, the other arguments) of `--config-name NAME` or `--config-name=NAME`; the
    last one counts.

    Raises:
        ValueError: no name follows.
    """
    name, rest, arguments = default, [], list(argv)
    while arguments:
        argument = arguments.pop(0)
        option, equals, value = argument.partition("=")
        if option != "--config-name":
            rest.append(argument)
            continue
        if not equals and not arguments:
            raise ValueError(f"Found --config-name without a name; expected for example {default}.")
        name = (value if equals else arguments.pop(0)).removesuffix(".yaml")
    return name, rest
