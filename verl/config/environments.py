"""Keys of what an action earns: the `verifiers` block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.config.keys import Block, Count, Positive, Share, key


@dataclass(slots=True)
class VerifiersConfig(Block):
    """Rewards by verifiers that the rows name (verl/verifiers)."""

    max_failed_share: Share = key(
        0.5, "the run stops when more of a step's trajectories could not be verified"
    )
    remap: dict[str, Any] = key({}, "{name: other name}: rows that name the first are verified by the other")
    cpu_seconds: Positive = key(
        5.0, "math, ifeval: processor seconds that one response may take; it is worth 0 beyond"
    )
    length_range: Count = key(
        32768, "max_length, up_to_max_length: so many tokens off the wanted length are worth 0"
    )
