"""vLLM as a rollout engine: in this process (`colocated_engine.py`), or apart in servers of its own. Here is
what both ask of vLLM's requests.
"""

from verl.workers.rollout.base import SamplingParams

SESSION_SEED = "session_seed"  # key of the seed in a request's extra_args
LEAST_TEMPERATURE = 0.01  # vLLM takes what lies below (and is not 0) as this


def check_supported(params: SamplingParams) -> None:
    """ValueError for what vLLM would silently do in another way than `SamplingParams` says."""
    if 0.0 < params.temperature < LEAST_TEMPERATURE:
        raise ValueError(
            f"temperature is {params.temperature}; vLLM takes 0 (greedy) or at least {LEAST_TEMPERATURE}"
        )
