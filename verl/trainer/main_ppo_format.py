"""Entry point: `python -m verl.trainer.main_ppo_format key=value ...`: training with the structure reward.

It is `verl.trainer.main_ppo` with training rows scored by `qa_em_format`, whose weights are
`reward_model.{structure_format_score, final_format_score, retrieval_score}`. Validation stays exact match.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from verl.config import Config
from verl.trainer.main_ppo import run
from verl.utils.logs import start_logging


def format_score(config: Config) -> Callable[..., Any]:
    """Return the structure reward with the weights of this run.

    The reward also returns the signs that it looks at (for `gdpo`).
    """
    from verl.utils.reward_score import qa_em_format

    weights = config.reward_model
    return functools.partial(
        qa_em_format.compute_score_em,
        structure_format_score=weights.structure_format_score,
        final_format_score=weights.final_format_score,
        retrieval_score=weights.retrieval_score,
    )


def main() -> None:
    start_logging("main_ppo_format")
    sys.exit(run(sys.argv[1:], format_score))


if __name__ == "__main__":
    main()
