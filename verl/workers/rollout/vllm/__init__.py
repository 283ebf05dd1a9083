"""vLLM as a rollout engine, in this process (`colocated_engine.py`) or behind servers that run already.

This file holds what both put into vLLM's requests.
"""

from verl.sessions.engine_contract import RolloutSession, SamplingParams

SESSION_SEED = "session_seed"  # key of the seed in a request's extra_args
DRAW_OFFSET = "draw_offset"  # key of the offset in a request's extra_args
LEAST_TEMPERATURE = 0.01  # vLLM raises lower temperatures (except 0) to this


def check_supported(params: SamplingParams) -> None:
    """Raise ValueError for parameters that vLLM would silently apply otherwise than `SamplingParams` says."""
    if 0.0 < params.temperature < LEAST_TEMPERATURE:
        raise ValueError(
            f"temperature is {params.temperature}; vLLM takes 0 (greedy) or at least {LEAST_TEMPERATURE}"
        )


def sampling_arguments(session: RolloutSession) -> dict[str, int]:
    """Return the `extra_args` of the request that goes on from a session's tokens.

    They are the seed and the offset from the number of a sequence's tokens to the number of tokens that were
    drawn with that seed. `sampler.py` counts by the latter, as the native engine does. So no number is drawn
    twice where a context begins anew, although its positions are those of the one before.
    """
    num_drawn = session.params.drawn_before + session.num_sampled
    return {
        SESSION_SEED: session.params.seed & 0xFFFFFFFFFFFFFFFF,
        DRAW_OFFSET: num_drawn - len(session.tokens),
    }
