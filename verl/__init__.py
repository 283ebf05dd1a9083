"""The reinforcement-learning framework: batches, process groups, trainer and workers."""

import sys
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl.protocol import DataProto

__version__ = "0.2.0"
__all__ = ["DataProto", "__version__"]

ROOT = Path(__file__).resolve().parents[1]
_excepthook = sys.excepthook


def _end_program(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """End a program of this project with one line, for an interrupt or a package that Python lacks.

    A Ctrl-C while modules are imported gives status 130. If a package is missing, the line says which Python
    lacks it, and the status is 2.
    """
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
        raise SystemExit(130)
    name = (getattr(error, "name", None) or "").split(".")[0]
    if not issubclass(kind, ModuleNotFoundError) or (ROOT / name).exists():
        return _excepthook(kind, error, trace)
    environment = ROOT / ".venv" / "bin" / "python"
    if Path(sys.prefix) == environment.parents[1]:
        return _excepthook(kind, error, trace)
    advice = (
        f"Use {environment}" if environment.exists() else "Run bash train_grpo.sh, which makes .venv once"
    )
    from verl.utils.extras import CONSTRAINTS, OPTIONAL_PACKAGES

    # A package that no other extra holds comes with the training stack and the retrieval server.
    extras = OPTIONAL_PACKAGES[name][1] if name in OPTIONAL_PACKAGES else "train,retrieval"
    constraints = ROOT / CONSTRAINTS.get(extras, "constraints.txt")
    print(
        f"error: {sys.executable} has no {name}. {advice}, or install the project: "
        f"{sys.executable} -m pip install -c {constraints} -e '{ROOT}[{extras}]'",
        file=sys.stderr,
    )
    raise SystemExit(2)


if sys.argv[:1] == ["-m"] or Path(sys.argv[0]).resolve().is_relative_to(ROOT):
    sys.excepthook = _end_program


def __getattr__(name: str) -> Any:
    """Provide `from verl import DataProto`, without torch for those who import something else."""
    if name != "DataProto":
        raise AttributeError(f"module 'verl' has no attribute {name!r}")
    from verl.protocol import DataProto

    return DataProto
