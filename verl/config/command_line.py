"""The arguments of a program: keys, files of keys, and the options that print the configuration and exit."""

from __future__ import annotations

import argparse
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
    """Return the configuration that the arguments ask for.

    Args:
        argv: the arguments.
        names: the configurations that the program takes. The first one is used without `--config-name`.

    Raises:
        ValueError: an argument can't be read; see `load`.
        SystemExit: with code 0 after `--help` or `--print`.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config-name", default=names[0])
    for flags in (("--help", "-h"), ("--print",), ("--origins",)):
        parser.add_argument(*flags, action="store_true")
    try:
        options, rest = parser.parse_known_args(list(argv))
    except argparse.ArgumentError as error:
        if error.argument_name != "--config-name":
            raise ValueError(f"Found {error.argument_name} with a value; expected it alone.") from None
        raise ValueError(f"Found --config-name without a name; expected for example {names[0]}.") from None
    name = options.config_name.removesuffix(".yaml")
    if name not in names:
        raise ValueError(f"Found --config-name {name}; expected one of: {', '.join(names)}.")
    loaded = load(rest, name)
    if options.help:
        print(OPTIONS.format(names=", ".join(names)))
        print(to_yaml(name, loaded))
    elif options.print or options.origins:
        print(to_yaml(name, loaded, with_origins=options.origins, with_meaning=False))
        print(f"# {len(settable(PROGRAMS[name].schema))} keys")
    else:
        return loaded
    sys.exit(0)
