"""Compare the names of verl's package with ours, and write the table of what is absent or differs.

    python scripts/compare_with_verl.py --read PATH   read verl's package into scripts/verl_names.json
    python scripts/compare_with_verl.py               print the table
    python scripts/compare_with_verl.py --write       write it into docs/verl_names.md

PATH is verl's wheel, its sdist, or a folder that holds verl/.

    verl's source --read_names--> verl_names.json \\
    our modules, imported -------------------------> differences --reasons--> table, or an error
    scripts/verl_reasons.yaml -------------------- /

verl's package is only parsed, never imported, so nothing that it imports is needed:

    pip download verl==0.9.1 --no-deps --dest /somewhere

Compared are the modules that exist under the same name here: their public functions, classes, methods and
constants, the names of the parameters, their order where they may be given by position, and their defaults
where those are plain values. A module that does not exist here is one row. Each difference needs a reason in
scripts/verl_reasons.yaml; without one, or with one for a difference that is gone, the script ends with 1.
"""

from __future__ import annotations

import argparse
import ast
import enum
import importlib
import inspect
import json
import re
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import verl  # noqa: E402, F401  # isort: skip  (first: it says which Python has a missing package)
import yaml  # noqa: E402

NAMES = ROOT / "scripts" / "verl_names.json"
REASONS = ROOT / "scripts" / "verl_reasons.yaml"
PAGE = ROOT / "docs" / "verl_names.md"
NO_DEFAULT = "required"
NOT_PLAIN = "not a plain value"

Parameters = list[list[str]]
"""[name, kind, default] of each parameter of a function, in order; see `parameters_of`."""


@dataclass(frozen=True)
class Difference:
    """A difference between verl and this project.

    Attributes:
        module: verl's module.
        name: the name in it, such as "agg_loss" or "DataProto.concat"; "" for the module itself.
        kind: absent, keyword, order or default.
        detail: the parameters that differ, or "" for what is absent.
    """

    module: str
    name: str
    kind: str
    detail: str = ""

    @property
    def key(self) -> str:
        """The name by which scripts/verl_reasons.yaml gives the reason."""
        return ".".join(part for part in (self.module, self.name) if part)


# ---- verl's side, by its source


def source_files(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (module, source) of each module of verl in a wheel, an sdist or a folder."""
    if path.is_dir():
        for file in sorted((path / "verl").rglob("*.py")):
            yield module_of(str(file.relative_to(path))), file.read_text()
    elif path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            for name in sorted(archive.namelist()):
                if name.startswith("verl/") and name.endswith(".py"):
                    yield module_of(name), archive.read(name).decode()
    else:
        with tarfile.open(path) as archive:
            for member in sorted(archive.getmembers(), key=lambda member: member.name):
                name = member.name.partition("/")[2]
                file = archive.extractfile(member)
                if file is not None and name.startswith("verl/") and name.endswith(".py"):
                    yield module_of(name), file.read().decode()


def module_of(name: str) -> str:
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def read_names(path: Path) -> dict[str, Any]:
    """Return what verl_names.json holds: the names of the modules that exist here too, and all other modules.

    Raises ValueError if there is no package verl at this path.
    """
    sources = dict(source_files(path))
    if "verl" not in sources:
        raise ValueError(
            f"Found no verl/__init__.py in {path}; expected verl's wheel, sdist or source folder."
        )
    here = {module for module in sources if our_file(module) is not None}
    return {
        "modules": {module: names_in(ast.parse(sources[module]), module) for module in sorted(here)},
        "absent": sorted(sources.keys() - here),
    }


def our_file(module: str) -> Path | None:
    """Return the file of our module of this name, or None."""
    base = ROOT.joinpath(*module.split("."))
    candidates = (base / "__init__.py", base.with_suffix(".py"))
    return next((file for file in candidates if file.is_file()), None)


def names_in(tree: ast.Module, module: str) -> dict[str, Any]:
    """Return the public names of a module: None for a value, parameters or methods for what can be called."""
    names: dict[str, Any] = {}
    for node in _top_level(tree.body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names[node.name] = parameters_of(node)
        elif isinstance(node, ast.ClassDef):
            names[node.name] = methods_of(node)
        elif isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("verl")):
            names |= {
                alias.asname or alias.name: None for alias in node.names if alias.name in exported(tree)
            }
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id: None for target in targets if isinstance(target, ast.Name)}
    return {name: value for name, value in sorted(names.items()) if is_public(name)}


def _top_level(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, those under `if` and `try` too."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _top_level(node.body)
            yield from _top_level(node.orelse)


def exported(tree: ast.Module) -> set[str]:
    """Return the strings of all lists that the module assigns to `__all__` or adds to it."""
    strings: set[str] = set()
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id == "__all__":
            strings |= {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
    return strings


IGNORED = {"logger", "T", "__all__", "WorkerType"}


def is_public(name: str) -> bool:
    return (name == "__init__" or not name.startswith("_")) and name not in IGNORED


def methods_of(node: ast.ClassDef) -> dict[str, Any]:
    """Return the public methods of a class with their parameters; a property, and a member, is None."""
    methods: dict[str, Any] = {}
    for child in node.body:
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            decorators = {ast.unparse(decorator) for decorator in child.decorator_list}
            is_value = bool(decorators & {"property", "cached_property", "functools.cached_property"})
            is_value |= any(decorator.endswith(".setter") for decorator in decorators)
            bound = 0 if "staticmethod" in decorators else 1
            methods[child.name] = None if is_value else parameters_of(child)[bound:]
        elif isinstance(child, ast.Assign):
            methods |= {target.id: None for target in child.targets if isinstance(target, ast.Name)}
    return {name: value for name, value in sorted(methods.items()) if is_public(name)}


def parameters_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Parameters:
    """Return [name, "position" or "keyword", default] of each parameter.

    *args and **kwargs are left out. The default is the repr of a plain value, or `NO_DEFAULT` or `NOT_PLAIN`.
    """
    arguments = node.args
    by_position = [*arguments.posonlyargs, *arguments.args]
    missing: list[ast.expr | None] = [None] * (len(by_position) - len(arguments.defaults))
    pairs = [
        (argument, "position", value)
        for argument, value in zip(by_position, [*missing, *arguments.defaults], strict=True)
    ]
    pairs += [
        (argument, "keyword", value)
        for argument, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    return [[argument.arg, kind, source_default(value)] for argument, kind, value in pairs]


def source_default(node: ast.expr | None) -> str:
    if node is None:
        return NO_DEFAULT
    try:
        return plain_default(ast.literal_eval(node))
    except ValueError:
        return NOT_PLAIN


def plain_default(value: Any) -> str:
    if isinstance(value, bool | int | float | str | None) and not isinstance(value, enum.Enum):
        return repr(float(value)) if type(value) is int else repr(value)
    return NOT_PLAIN


# ---- our side, imported


def our_parameters(function: Any) -> Parameters | None:
    """Return what `parameters_of` returns, of our function; None for what can't be called."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    parameters: Parameters = []
    for parameter in signature.parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        kind = "keyword" if parameter.kind is parameter.KEYWORD_ONLY else "position"
        default = NO_DEFAULT if parameter.default is parameter.empty else plain_default(parameter.default)
        parameters.append([parameter.name, kind, default])
    return parameters


def differences(names: Mapping[str, Any]) -> list[Difference]:
    """Return all differences between verl's names and our code.

    Raises ValueError if a module exists here by now whose names were not read.
    """
    all_differences = []
    for module in names["absent"]:
        if our_file(module) is not None:
            raise ValueError(
                f"Found {module} in {NAMES.name} as absent, but it exists here; read verl again (--read)."
            )
        all_differences.append(Difference(module, "", "absent"))
    for module, theirs in names["modules"].items():
        if our_file(module) is None:
            all_differences.append(Difference(module, "", "absent"))
            continue
        ours = importlib.import_module(module)
        for name, value in theirs.items():
            if not hasattr(ours, name):
                all_differences.append(Difference(module, name, "absent"))
            elif isinstance(value, list):
                all_differences += of_function(module, name, value, getattr(ours, name))
            elif isinstance(value, dict):
                all_differences += of_class(module, name, value, getattr(ours, name))
    return all_differences


def of_class(module: str, name: str, methods: Mapping[str, Any], ours: Any) -> Iterator[Difference]:
    for method, parameters in methods.items():
        full_name = name if method == "__init__" else f"{name}.{method}"
        if method == "__init__":
            yield from of_function(module, full_name, parameters, ours)
        elif not hasattr(ours, method) and not is_set_in(ours, method):
            yield Difference(module, full_name, "absent")
        elif parameters is not None and hasattr(ours, method):
            raw = inspect.getattr_static(ours, method)
            skip = 0 if isinstance(raw, staticmethod | classmethod) else 1
            yield from of_function(module, full_name, parameters, getattr(ours, method), skip)


def is_set_in(ours: Any, attribute: str) -> bool:
    """Return whether a class or one of its bases sets `self.<attribute>` or declares it."""
    for base in inspect.getmro(ours):
        if attribute in vars(base).get("__annotations__", {}):
            return True
        if not base.__module__.startswith("verl"):
            continue
        if re.search(rf"self\.{attribute}(: [^=\n]+)? = ", inspect.getsource(base)):
            return True
    return False


def of_function(
    module: str, name: str, theirs: Parameters, function: Any, skip: int = 0
) -> Iterator[Difference]:
    """Yield how our function's parameters differ; `skip` of them are bound."""
    parameters = our_parameters(function)
    if parameters is None:
        return
    parameters = parameters[skip:]
    ours = {parameter: default for parameter, _, default in parameters}
    missing = [parameter for parameter, _, _ in theirs if parameter not in ours]
    if missing:
        yield Difference(module, name, "keyword", ", ".join(missing))
    wanted = [parameter for parameter, kind, _ in theirs if kind == "position"]
    order = [parameter for parameter, kind, _ in parameters if kind == "position"][: len(wanted)]
    moved = [
        parameter
        for position, parameter in enumerate(wanted)
        if parameter in ours and order[position : position + 1] != [parameter]
    ]
    if moved:
        yield Difference(module, name, "order", ", ".join(moved))
    others = [
        f"{parameter}={shown(ours[parameter])} (verl: {shown(default)})"
        for parameter, _, default in theirs
        if parameter in ours and is_other(default, ours[parameter])
    ]
    if others:
        yield Difference(module, name, "default", ", ".join(others))


def is_other(theirs: str, ours: str) -> bool:
    """Return whether a call without the argument means something else here, or is an error here alone."""
    if ours == NO_DEFAULT:
        return theirs != NO_DEFAULT
    return theirs not in (NO_DEFAULT, ours) and NOT_PLAIN not in (theirs, ours)


def shown(default: str) -> str:
    return default if default in (NO_DEFAULT, NOT_PLAIN) else default.replace("'", '"')


# ---- the table


def reason_of(key: str, reasons: Mapping[str, str]) -> str | None:
    """Return the key of the reason for this name: its own, or that of the longest "prefix.*" that fits."""
    if key in reasons:
        return key
    parts = key.split(".")
    prefixes = (".".join(parts[:length]) + ".*" for length in range(len(parts), 0, -1))
    return next((prefix for prefix in prefixes if prefix in reasons), None)


def table(names: Mapping[str, Any], reasons: Mapping[str, str]) -> str:
    """Return docs/verl_names.md.

    Raises ValueError that lists the differences without a reason, and the reasons without a difference.
    """
    all_differences = differences(names)
    used = {difference.key: reason_of(difference.key, reasons) for difference in all_differences}
    without = sorted({f"{d.key} ({d.kind} {d.detail})" for d in all_differences if used[d.key] is None})
    needless = sorted(set(reasons) - {key for key in used.values() if key is not None})
    if without or needless:
        lines = [f"no reason for: {name}" for name in without]
        lines += [f"no difference any more for the reason: {name}" for name in needless]
        raise ValueError(f"{REASONS.relative_to(ROOT)} does not fit:\n" + "\n".join(lines))
    modules = names["modules"]
    num_names = sum(len(theirs) for theirs in modules.values())
    text = [HEAD.format(modules=len(modules), names=num_names, others=len(names["absent"]))]
    text.append("\n## In modules that exist here too\n")
    text.append("| verl | difference | here |\n|---|---|---|")
    for difference in all_differences:
        key = used[difference.key]
        if difference.name and key is not None:
            text.append(f"| `{difference.key}` | {said(difference)} | {reasons[key]} |")
    text.append("\n## Modules that do not exist here\n")
    text.append("| verl | here |\n|---|---|")
    rows: dict[str, list[str]] = {}
    for difference in all_differences:
        key = used[difference.key]
        if not difference.name and key is not None:
            rows.setdefault(key, []).append(difference.module)
    for key, members in rows.items():
        text.append(f"| {shortened(key, members)} | {reasons[key]} |")
    return "\n".join(text) + "\n"


def said(difference: Difference) -> str:
    if difference.kind == "absent":
        return "absent"
    detail = ", ".join(f"`{name}`" for name in difference.detail.split(", "))
    sentences = {
        "keyword": f"does not take {detail}",
        "order": f"{detail}: by keyword only, or at another place",
    }
    return sentences.get(difference.kind, f"other default: {detail}")


def shortened(key: str, members: list[str]) -> str:
    """Return the modules that a reason is for, in a form that is easy to search."""
    prefix = key.removesuffix(".*")
    if len(members) == 1:
        return f"`{members[0]}`"
    return f"`{prefix}`: " + ", ".join(f"`{member.removeprefix(prefix) or member}`" for member in members)


HEAD = """# Names of verl that are absent here

<!-- made by python scripts/compare_with_verl.py --write; the reasons stand in scripts/verl_reasons.yaml -->

{modules} modules of verl 0.9.1 exist here under the same name, with {names} public names in them; {others}
modules do not exist here. The tables list all that is absent or takes other arguments. What they do not
list is there and takes verl's keywords. [extending.md](extending.md) says what has the same name and works
in another way.
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--read", type=Path, help="verl's wheel, sdist or source folder")
    parser.add_argument("--write", action="store_true", help="write docs/verl_names.md")
    options = parser.parse_args()
    try:
        if options.read is not None:
            NAMES.write_text(json.dumps(read_names(options.read), indent=1) + "\n")
        text = table(json.loads(NAMES.read_text()), yaml.safe_load(REASONS.read_text()))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.write:
        PAGE.write_text(text)
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
