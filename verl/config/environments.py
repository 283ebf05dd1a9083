"""Keys of what an action does and what it earns: the blocks `environment` and `verifiers`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.config.keys import Block, Count, Positive, Share, key


@dataclass(slots=True)
class EnvironmentConfig(Block):
    """What an action of the policy does (verl/environments)."""

    env_class: str = key(
        "search", "environment of rows without a column env_class: a name, or package.module:Class"
    )
    max_workers: Count = key(
        256,
        "most environments at a step in threads of one process; of those in processes, 32 compute at once",
    )
    executor: str = key(
        "auto", "where environments run; auto: where their class says", "auto inline thread process"
    )
    step_timeout: Positive = key(60.0, "seconds of an init or a step; then its trajectory is left out")
    max_failed_share: Share = key(0.5, "the run stops when environments fail in more of a step's rows")
    observation_format: str | None = key(
        None,
        "as it is, or as messages of the chat template (null: chat where there is one; searches raw)",
        "raw chat null",
    )
    env_config: dict[str, Any] = key({}, "{environment: {its own settings}}")


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
