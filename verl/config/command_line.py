"""The arguments of a program: keys, files of keys, and the options of Hydra and of our own."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from verl.config.keys import settable
from verl.config.loading import PROGRAMS, Loaded, load
from verl.config.overrides import Folders
from verl.config.render import explain, to_yaml

OPTIONS = """\
--help              this list, with the values that the other arguments give
--help KEY          what a key, or each key of a group such as data, means, takes and is set to
--print             these values, without their meaning; --print --origins: where each comes from
--config-name NAME  another primary file: {names}, or one of your own
--config-dir DIR    a folder with files of your own: DIR/NAME.yaml, DIR/recipe/NAME.yaml
--config-path DIR   the folder of the primary files, in place of verl/trainer/config
--multirun          a run for each combination of values, as trainer.seed=1,2 (docs/configuration.md)
+recipe=NAME        keys from configs/NAME.yaml or DIR/recipe/NAME.yaml
@ FILE              keys from a .yaml or .toml file; of several files and recipes the later ones win
Layers, the weakest first: primary file, environment (VERL__TRAINER__SEED=1), recipes and files, key=value."""

_TOPIC = re.compile(r"\w[\w.]*")
_FLAGS = (("--help", "-h"), ("--print",), ("--origins",), ("--multirun", "-m"))
_WITH_VALUE = (("--config-name", "-cn"), ("--config-dir", "-cd"), ("--config-path", "-cp"))


@dataclass(frozen=True)
class CommandLine:
    """The arguments of a program, separated into options and the rest.

    Attributes:
        names: the shipped primary files of the program, among PROGRAMS.
        config_name: the primary file.
        folders: folders with files of the user's own.
        rest: overrides, and files of keys.
        shown: what is printed in place of a run: "help", "print", "origins" or nothing.
        multirun: whether the arguments ask for a sweep.
        topic: the key, or the group of keys, that is explained in place of all; "" for all.
    """

    names: Sequence[str]
    config_name: str
    folders: Folders
    rest: Sequence[str]
    shown: str
    multirun: bool
    topic: str = ""

    @property
    def options(self) -> list[str]:
        """Return the options that a job of a sweep gets too."""
        options = [f"--config-name={self.config_name}"]
        options += [f"--config-path={self.folders.path}"] * (self.folders.path is not None)
        options += [f"--config-dir={self.folders.directory}"] * (self.folders.directory is not None)
        flags = {"help": ["--help"], "print": ["--print"], "origins": ["--print", "--origins"]}
        return options + flags.get(self.shown, [])

    @property
    def program(self) -> str:
        """Return the program's name in PROGRAMS."""
        return self.names[0]

    def jobs(self) -> list[Sequence[str]]:
        """Return the arguments of each job of a sweep; without --multirun there is one job."""
        if not self.multirun:
            return [self.rest]
        from verl.config.sweeps import combinations  # it imports Hydra, which takes time

        return [*combinations(self)]

    def load(self, arguments: Sequence[str]) -> Loaded:
        """Load the configuration of the arguments, with the options of the command line."""
        return load(arguments, self.config_name, program_name=self.program, folders=self.folders)


def parse(argv: Sequence[str], names: Sequence[str]) -> CommandLine:
    """Separate the options from the other arguments. Raise ValueError if an option can't be read."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flags in _FLAGS:
        parser.add_argument(*flags, action="store_true")
    for flags in _WITH_VALUE:
        parser.add_argument(*flags)
    topic, argv = _split_topic(argv)
    try:
        options, rest = parser.parse_known_args(list(argv))
    except argparse.ArgumentError as error:
        option = str(error.argument_name).split("/")[0]
        if not option.startswith("--config"):
            raise ValueError(f"Found {error.argument_name} with a value; expected it alone.") from None
        kind = "name" if option == "--config-name" else "folder"
        example = f" for example {names[0]}" if kind == "name" else " one"
        raise ValueError(f"Found {option} without a {kind}; expected{example}.") from None
    name = (options.config_name or names[0]).removesuffix(".yaml")
    folders = Folders(options.config_path, options.config_dir)
    if name not in names and (name in PROGRAMS or folders == Folders()):
        expected = f"{', '.join(names)}, or with --config-dir a file of yours"
        raise ValueError(f"Found --config-name {name}; expected one of: {expected}.")
    shown = ""
    if options.help:
        shown = "help"
    elif options.origins:
        shown = "origins"
    elif options.print:
        shown = "print"
    return CommandLine(
        names=names,
        config_name=name,
        folders=folders,
        rest=rest,
        shown=shown,
        multirun=options.multirun,
        topic=topic,
    )


def _split_topic(argv: Sequence[str]) -> tuple[str, list[str]]:
    """Separate the KEY of `--help KEY` from the other arguments; "" if there is none.

    KEY is a bare word. Overrides have an equals sign, and files and recipes begin with a sign.
    """
    arguments = list(argv)
    for number, argument in enumerate(arguments[:-1]):
        following = arguments[number + 1]
        if argument in ("--help", "-h") and _TOPIC.fullmatch(following):
            del arguments[number + 1]
            return following, arguments
    return "", arguments


def read_arguments(
    argv: Sequence[str],
    names: Sequence[str] = ("ppo_trainer", "ppo_megatron_trainer"),
    module: str | None = None,
) -> Loaded:
    """Return the configuration that the arguments ask for.

    Args:
        argv: the arguments.
        names: the primary files that the program takes. The first one is used without `--config-name`.
        module: the program, `python -m MODULE`, which `--multirun` starts for each job. None means that
            `--multirun` is refused.

    Raises:
        ValueError: an argument can't be read; see `load`.
        SystemExit: with code 0 after `--help` or `--print`, with the status of the jobs after `--multirun`.
    """
    command = parse(argv, names)
    if command.multirun and module is None:
        raise ValueError("Found --multirun; expected it for verl.trainer.main_ppo or fsdp_sft_trainer.")
    if command.multirun and command.shown != "help":
        from verl.config.sweeps import run_sweep

        sys.exit(run_sweep(command, str(module)))
    loaded = command.load(command.jobs()[0])
    if not command.shown:
        return loaded
    show(command, loaded)
    sys.exit(0)


def show(command: CommandLine, loaded: Loaded) -> None:
    """Print what `--help`, `--print` or `--print --origins` asks for."""
    if command.topic:
        print(explain(command.program, loaded, command.topic), end="")
    elif command.shown == "help":
        print(OPTIONS.format(names=", ".join(command.names)))
        print(to_yaml(command.program, loaded))
    else:
        is_with_origins = command.shown == "origins"
        print(to_yaml(command.program, loaded, with_origins=is_with_origins, with_meaning=False))
        print(f"# {len(settable(PROGRAMS[command.program].schema))} keys")
