"""The schema as people and editors read it: yaml with the meaning of each key, and a JSON schema."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from verl.config.keys import Block, Key, format_value, get_value, settable, to_dict
from verl.config.loading import PROGRAMS, Loaded, nearest_keys

_COMMENT_AT = 34
_WIDTH = 120
_JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
_HEADER = """\
Hydra reads this file: what you change here holds for every run. `--config-dir` adds a folder with files of
your own. Stronger are environment variables (VERL__TRAINER__SEED=1), then recipes (`+recipe=NAME`) and
files of keys (`@ file.yaml` or .toml), then `key=value` on the command line; see docs/configuration.md.
`python -m verl.config` writes this file anew from the schema in verl/config.
"""
_NUMBER = re.compile(r"[+-]?(\d[\d_]*(\.\d*)?|\.\d+)([eE][+-]?\d+)?")


class _YamlDumper(yaml.SafeDumper):
    """A dumper that puts text such as 1e5 in quotes: files of keys read it as a number."""


_YamlDumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="'" if _NUMBER.fullmatch(text) else None
    ),
)


def to_yaml(
    config_name: str, loaded: Loaded | None = None, with_origins: bool = False, with_meaning: bool = True
) -> str:
    """Return every key that can be set, in blocks, with its value and a comment.

    Args:
        config_name: one of PROGRAMS.
        loaded: the configuration whose values are shown. None: the defaults, with `${key}` where one follows
            another.
        with_origins: whether the comment says where the value is from.
        with_meaning: whether the comment says what the key means.
    """
    lines: list[str] = []
    shown_groups: list[str] = []
    for path, spec in settable(PROGRAMS[config_name].schema).items():
        *groups, name = path.split(".")
        for depth, group in enumerate(groups):
            if groups[: depth + 1] != shown_groups[: depth + 1]:
                lines += [""] * (depth == 0) + [f"{'  ' * depth}{group}:"]
        shown_groups = groups
        value = f"${{{spec.follows}}}" if spec.follows else spec.default
        if loaded is not None:
            value = get_value(loaded.config, path)
        comment = spec.meaning if with_meaning else ""
        if loaded is not None and with_origins:
            comment = loaded.origins[path]
        text = yaml.dump(value, Dumper=_YamlDumper, default_flow_style=True, width=10_000)
        setting = f"{'  ' * len(groups)}{name}: {text.removesuffix('...' + chr(10)).strip()}"
        start = max(_COMMENT_AT, len(setting) + 2)
        if start > _WIDTH - 30:  # there is no room beside the setting
            lines += [
                f"{'':{_COMMENT_AT}}# {line}" for line in textwrap.wrap(comment, _WIDTH - _COMMENT_AT - 2)
            ]
            lines.append(setting)
        else:
            first, *more = textwrap.wrap(comment, _WIDTH - start - 2) or [""]
            lines.append(f"{setting:{start}}# {first}" if first else setting)
            lines += [f"{'':{start}}# {line}" for line in more]
    return "\n".join(lines) + "\n"


def explain(config_name: str, loaded: Loaded, name: str) -> str:
    """Return what the keys of a name mean, which values they take, and what they are set to.

    Args:
        config_name: one of PROGRAMS.
        loaded: the configuration whose values are shown.
        name: a key, a group of keys, or the last part of keys' names, such as save_freq.

    Raises:
        ValueError: there is no key of this name.
    """
    keys = settable(PROGRAMS[config_name].schema)
    chosen = [path for path in keys if f"{path}.".startswith(f"{name}.")]
    chosen = chosen or [path for path in keys if f".{path}".endswith(f".{name}")]
    chosen = chosen or [path for path in keys if f".{name}." in f".{path}"]
    if not chosen:
        first, *others = nearest_keys(name, list(keys))
        raise ValueError(
            f"Found no key {name!r}; the nearest known key is {first!r} (then {', '.join(others)}). --help "
            "without a key lists all."
        )
    lines: list[str] = []
    for path in chosen:
        spec = keys[path]
        origin = "" if loaded.origins[path] == "default" else f"; set by: {loaded.origins[path]}"
        default = f"as {spec.follows}" if spec.follows else format_value(spec.default)
        lines.append(f"{path}={format_value(get_value(loaded.config, path))}")
        lines += textwrap.wrap(spec.meaning, _WIDTH, initial_indent="    ", subsequent_indent="    ")
        lines += textwrap.wrap(
            f"takes {spec.expected}; default {default}{origin}",
            _WIDTH,
            initial_indent="    ",
            subsequent_indent="    ",
        )
    return "\n".join(lines) + "\n"


def yaml_file(config_name: str) -> str:
    """Return the readable file of a program's keys."""
    module = {"sft_trainer": "fsdp_sft_trainer"}.get(config_name, "main_ppo")
    first = f"Configuration of `python -m verl.trainer.{module} key=value ...`.\n"
    header = "".join(f"# {line}\n" for line in (first + _HEADER).splitlines())
    return f"{header}defaults: [{PROGRAMS[config_name].schema_name}, _self_]\n" + to_yaml(config_name)


def json_schema() -> str:
    """Return a schema for editors: what a file of keys (a recipe in configs/) of either program may hold."""
    programs = []
    for config_name in ("ppo_trainer", "sft_trainer"):
        top = _closed_object()
        for path, spec in settable(PROGRAMS[config_name].schema).items():
            *groups, name = path.split(".")
            inner = top
            for group in groups:
                inner = inner["properties"].setdefault(group, _closed_object())
            inner["properties"][name] = _property(spec)
        programs.append(top)
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "anyOf": programs}
    return json.dumps(schema, indent=1) + "\n"


def _closed_object() -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": {}}


def _property(spec: Key) -> dict[str, Any]:
    kinds = [_JSON_TYPES[kind] for kind in spec.types] + ["null"] * spec.nullable
    entry: dict[str, Any] = {"description": spec.meaning, "type": kinds if len(kinds) > 1 else kinds[0]}
    if spec.choices and not spec.importable:
        entry["enum"] = list(dict.fromkeys([*spec.choices, *[None] * spec.nullable]))
    if spec.bounds is not None:
        entry["exclusiveMinimum" if spec.bounds.above else "minimum"] = spec.bounds.low
        if spec.bounds.high is not None:
            entry["maximum"] = spec.bounds.high
    return entry


def write_yaml(config: Block, path: Path) -> None:
    """Write a run's config.yaml: the keys with their values, which `@ path` reads again."""
    text = yaml.dump(to_dict(config), Dumper=_YamlDumper, sort_keys=False, width=100, allow_unicode=True)
    path.write_text(text, encoding="utf-8")


def read_yaml(path: Path) -> Mapping[str, Any]:
    """Read what `write_yaml` wrote."""
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}
