"""The reinforcement-learning framework: batches, process groups, trainer and workers."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl.protocol import DataProto

__version__ = "0.1.0"
__all__ = ["DataProto", "__version__"]


def __getattr__(name: str) -> Any:
    """`from verl import DataProto`, without torch for those who import something else."""
    if name != "DataProto":
        raise AttributeError(f"module 'verl' has no attribute {name!r}")
    from verl.protocol import DataProto

    return DataProto
