"""The engine's figures of one batch, for the training metrics.

    engine.stats() before, during and after the batch -> EngineLoad -> {"rollout/...": float}

docs/metrics.md lists the names. If an engine does not know a figure, the names made from it are left out.
Gauges are read every SAMPLE_STEPS steps. Over several processes each figure is their mean, as all metrics of
workers are.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from verl.sessions.engine_contract import RolloutEngine

SAMPLE_STEPS = 16
GAUGES = ("running", "queued", "parked", "kv_used_share", "kv_bytes")
SUMS = ("steps", "seconds", "generated_tokens", "prefilled_tokens", "prefix_hit_tokens", "preemptions")


class EngineLoad:
    """The load of one engine during one batch."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._before = engine.stats()
        self._seen: list[Mapping[str, float]] = []

    def sample(self, num_steps: int) -> None:
        """Read the gauges if it is time to. Call it after each step, with the number of steps so far."""
        if num_steps % SAMPLE_STEPS == 1:
            self._seen.append(self._engine.stats())

    def metrics(self) -> dict[str, float]:
        """Return the batch's figures. Call it once the batch is over."""
        after = self._engine.stats()
        metrics = {name: float(after[name] - self._before.get(name, 0.0)) for name in SUMS if name in after}
        for name in GAUGES:
            values = [stats[name] for stats in self._seen if name in stats]
            if values:
                metrics[f"{name}/max"] = float(max(values))
                if name != "kv_bytes":
                    metrics[f"{name}/mean"] = float(np.mean(values))
        if metrics.get("seconds") and "generated_tokens" in metrics:
            metrics["tokens_per_second"] = metrics["generated_tokens"] / metrics["seconds"]
        prompt_tokens = metrics.get("prefilled_tokens", 0.0) + metrics.get("prefix_hit_tokens", 0.0)
        if prompt_tokens and "prefix_hit_tokens" in metrics:
            metrics["prefix_hit_share"] = metrics["prefix_hit_tokens"] / prompt_tokens
        return {f"rollout/{name}": value for name, value in metrics.items()}
