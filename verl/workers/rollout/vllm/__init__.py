"""vLLM as a rollout engine, in this process (`colocated_engine.py`) or apart in servers of its own.

This file has what both ask of vLLM's requests.
"""

from verl.sessions.engine_contract import SamplingParams

SESSION_SEED = "session_seed"  # key of the seed in a request's extra_args
LEAST_TEMPERATURE = 0.01  # vLLM raises lower temperatures (except 0) to this


def check_supported(params: SamplingParams) -> None:
    """Raise ValueError for parameters that vLLM would silently apply otherwise than `SamplingParams` says."""
    if 0.0 < params.temperature < LEAST_TEMPERATURE:
        raise ValueError(
            f"temperature is {params.temperature}; vLLM takes 0 (greedy) or at least {LEAST_TEMPERATURE}"
        )
