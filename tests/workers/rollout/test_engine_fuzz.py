"""Random schedules: whatever runs beside a session, it samples what it samples alone; and nothing leaks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from rollout_models import CONFIGS, make_model
from schedules import Schedule, Trajectory, check_alone, versions
from transformers import PreTrainedModel

from verl.workers.rollout.native.runner import PagedRunner


def play(
    seeds: range,
    make: Callable[[int], Schedule] = Schedule,
    check: Callable[[list[Trajectory]], int] = check_alone,
) -> dict[str, float]:
    """Run and check schedules; sums of the engines' statistics and of checked tokens, to see what was met."""
    sums: dict[str, float] = {"tokens": 0.0}
    for seed in seeds:
        try:
            schedule = make(seed)
            schedule.run()
            sums["tokens"] += check(schedule.closed)
        except BaseException as error:
            error.add_note(f"schedule {seed}: the same seed plays it again")
            raise
        for name, value in schedule.engine.stats().items():
            sums[name] = sums.get(name, 0.0) + value
    return sums


def test_a_hundred_random_schedules_sample_what_each_session_samples_alone() -> None:
    sums = play(range(100))
    assert min(sums[name] for name in ("preemptions", "evictions", "prefix_hit_tokens", "tokens")) > 50


@pytest.mark.slow
def test_five_hundred_random_schedules_sample_what_each_session_samples_alone() -> None:
    play(range(1_000_000, 1_000_500))


def play_real(name: str, seeds: range) -> dict[str, float]:
    """Schedules on a real model, greedy; every update of the weights takes the other of two models."""
    models = [make_model(name, seed=seed) for seed in (0, 1)]

    def make(seed: int) -> Schedule:
        return Schedule(
            seed,
            lambda block_size, longest: PagedRunner(
                CONFIGS[name], block_size=block_size, max_model_len=longest
            ),
            lambda version: models[version % 2].named_parameters(),
            greedy=True,
        )

    return play(seeds, make, lambda trajectories: check_greedy(models, trajectories))


@torch.no_grad()
def check_greedy(models: list[PreTrainedModel], trajectories: list[Trajectory]) -> int:
    """Every token has the highest of Hugging Face's logits, and its log-probs; the number of tokens."""
    longest = max((len(trajectory.tokens) for trajectory in trajectories), default=0)
    if not longest:
        return 0
    ids = torch.tensor([[*t.tokens, *[0] * (longest - len(t.tokens))] for t in trajectories])
    expected = [model(ids).logits.log_softmax(-1) for model in models]
    count = 0
    for row, trajectory in enumerate(trajectories):
        for turn in trajectory.turns:
            for index, (token, version) in enumerate(zip(turn.tokens, versions(turn), strict=True)):
                log_probs = expected[version % 2][row, turn.start + index - 1]
                assert log_probs[token] > log_probs.max() - 1e-4
                assert abs(log_probs[token] - turn.log_probs[index]) < 1e-4
                count += 1
    return count


def test_random_schedules_on_a_real_model_give_hugging_faces_greedy_tokens() -> None:
    assert play_real("qwen3", range(15))["tokens"] > 100


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2", "gemma3"])
def test_hundreds_of_schedules_on_real_models_give_hugging_faces_greedy_tokens(name: str) -> None:
    sums = play_real(name, range(100, 250))
    assert min(sums[name] for name in ("preemptions", "evictions", "prefix_hit_tokens", "tokens")) > 10
