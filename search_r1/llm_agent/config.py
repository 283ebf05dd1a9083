"""What can be set about the agent loop."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GenerationConfig:
    """How trajectories are made. Lengths in tokens; `generation.py` says what they bound.

    `search_delay_steps`: an observation joins exactly so many engine steps after its search was asked, which
    makes the engine's batches, and with them float rounding, repeatable; None: as soon as it is there.
    `max_in_flight`: most trajectories under way at a time, those that wait for a search too; None: all.
    `straggler_factor`: training batches don't wait for groups later than so many times the median (see
    `stragglers.py`); measured in seconds, with `search_delay_steps` in engine steps; None: they wait.
    `temperature`, `top_p`, `top_k` are used where a batch's `meta_info` does not say.
    """

    max_turns: int
    max_start_length: int
    max_prompt_length: int
    max_response_length: int
    max_obs_length: int
    topk: int = 3
    do_search: bool = True
    no_think_rl: bool = False
    search_delay_steps: int | None = None
    max_in_flight: int | None = None
    straggler_factor: float | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name in (
            "max_start_length",
            "max_prompt_length",
            "max_response_length",
            "max_obs_length",
            "topk",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: found {getattr(self, name)}, expected at least 1")
        if self.max_turns < 0:
            raise ValueError(f"max_turns: found {self.max_turns}, expected 0 or more")
        if self.max_start_length >= self.max_prompt_length:
            raise ValueError(
                f"max_start_length: found {self.max_start_length}, expected less than max_prompt_length "
                f"({self.max_prompt_length}), which bounds the prompt and everything after it"
            )
        if self.search_delay_steps is not None and self.search_delay_steps < 0:
            raise ValueError(
                f"search_delay_steps: found {self.search_delay_steps}, expected 0 or more, or null"
            )
        if self.max_in_flight is not None and self.max_in_flight < 1:
            raise ValueError(f"max_in_flight: found {self.max_in_flight}, expected at least 1, or null")
        if self.straggler_factor is not None and not self.straggler_factor >= 1:
            raise ValueError(
                f"straggler_factor: found {self.straggler_factor}, expected 1 or more "
                "(times the median), or null"
            )
        if self.no_think_rl:
            raise ValueError(
                "no_think_rl: found true; only false works, ids that were not sampled are not trained"
            )
