"""Pools of easy, normal and hard prompts: what is drawn from each, and that a restart changes nothing."""

import numpy as np
import pytest

from verl.config.prompt_selection import PoolsConfig
from verl.data.difficulty_pools import DifficultyPools
from verl.data.rl_dataset import PromptSampler


def make(num_rows: int = 24, batch_size: int = 8, **config: float) -> DifficultyPools:
    settings = {"easy_share": 0.25, "hard_share": 0.25} | config
    return DifficultyPools(PoolsConfig(**settings), num_rows, batch_size, True, 3)


def measured(rates: dict[int, float], **config: float) -> DifficultyPools:
    pools = make(**config)
    pools.record(list(rates), list(rates.values()))
    return pools


def test_without_measurements_the_order_is_the_samplers():
    pools = make()
    sampler = PromptSampler(24, 8, True, 3)
    assert [pools.take(8) for _ in range(7)] == [sampler.take(8) for _ in range(7)]


def test_each_pool_gives_its_share():
    pools = measured(dict.fromkeys(range(8), 1.0) | dict.fromkeys(range(8, 16), 0.0))
    for _ in range(4):
        drawn = np.array(pools.take(8))
        assert ((drawn < 8).sum(), (drawn >= 16).sum()) == (2, 4) and len(set(drawn)) == 8
    counts = pools.draws
    assert counts[:8].tolist() == [1] * 8 and counts[8:16].tolist() == [1] * 8  # none twice before all once
    assert counts[16:].tolist() == [2] * 8


@pytest.mark.parametrize(
    "num_easy, num_hard, expected",
    [(24, 0, (8, 0, 0)), (0, 24, (0, 0, 8)), (20, 4, (4, 0, 4)), (2, 20, (2, 2, 4)), (1, 1, (1, 6, 1))],
)
def test_what_a_pool_lacks_comes_from_the_others(num_easy, num_hard, expected):
    easy = range(num_easy)
    hard = range(num_easy, num_easy + num_hard)
    pools = measured(dict.fromkeys(easy, 1.0) | dict.fromkeys(hard, 0.0))
    drawn = pools.pools()[pools.take(8)]
    assert tuple(np.bincount(drawn, minlength=3)) == expected


def test_thresholds_say_which_prompts_are_easy_and_hard():
    """The scores may be any: an environment's rewards, or a mean of parts."""
    pools = measured({0: 3.0, 1: 2.0, 2: 1.0, 3: -1.0}, easy_threshold=2.0, hard_threshold=-0.5)
    assert pools.pools()[:5].tolist() == [0, 0, 1, 2, 1]
    assert measured({0: 3.0, 1: 0.9, 2: 0.0}).pools()[:3].tolist() == [0, 1, 2]


def test_rule_10_saved_and_loaded_they_draw_the_same():
    rng = np.random.default_rng(0)
    pools = make()
    for _ in range(5):
        rows = pools.take(8)
        pools.record(rows, rng.integers(0, 3, 8) / 2)
    resumed = make()
    resumed.load_state_dict(pools.state_dict())
    resumed.load_history(pools.history())
    assert [pools.take(5) for _ in range(9)] == [resumed.take(5) for _ in range(9)]
    with pytest.raises(ValueError, match=r"Found nothing that .* with prompt_selection.*pools.enable=true"):
        make().load_history({})


def test_prompts_that_were_asked_come_again_only_where_all_others_were_asked():
    pools = make(num_rows=10)
    drawn = pools.take(8, [0, 1, 2, 3, 4])
    assert sorted(drawn[:5]) == [5, 6, 7, 8, 9] and set(drawn[5:]) <= {0, 1, 2, 3, 4} and len(set(drawn)) == 8
    drawn = pools.take(25)
    assert [sorted(drawn[start : start + 10]) for start in (0, 10)] == [list(range(10))] * 2
    assert len(set(drawn[20:])) == 5


def test_the_prompts_of_a_step_are_mixed_over_the_pools():
    pools = measured(dict.fromkeys(range(8), 1.0) | dict.fromkeys(range(8, 16), 0.0))
    of_steps = [pools.pools()[pools.take(8)].tolist() for _ in range(4)]
    assert all(sorted(drawn) == [0, 0, 1, 1, 1, 1, 2, 2] for drawn in of_steps)
    assert [drawn for drawn in of_steps if drawn == sorted(drawn)] == []
