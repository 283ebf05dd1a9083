"""The names of a run's processes, as `ray list actors` shows them: `<experiment>/trainer-0`.

A run has a Ray namespace of its own, so runs of one name on one cluster don't get in each other's way.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path

ORCHESTRATOR = "orchestrator"
TRAINER = "trainer"
SAMPLER = "sampler"


@dataclass(frozen=True)
class RunNames:
    """The names of the processes of one run.

    Attributes:
        experiment: `trainer.experiment_name`.
        namespace: the run's namespace in Ray.
    """

    experiment: str
    namespace: str

    @classmethod
    def of(cls, experiment: str, folder: str) -> RunNames:
        """Return the names of the run in a folder."""
        path = str(Path(folder).expanduser().absolute())
        return cls(experiment, f"{experiment}-{zlib.crc32(path.encode()):08x}")

    def full(self, process: str) -> str:
        """Return the name in Ray of a process such as "trainer-0"."""
        return f"{self.experiment}/{process}"
