"""Rollouts ahead of training, with processes that are played: any order and speed, kills, silence."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from played_rollouts import Played, Prompts, Sent

from verl.config import Config, load_config, replace_values
from verl.trainer.ppo import stream as stream_module
from verl.trainer.ppo.stream import RolloutStream, StalenessGate


def play(seed: int, config: Config, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of some steps by chance, whose settings go into `config`; asserts what must hold at each."""
    rng = random.Random(seed)
    k = rng.randint(0, 4)
    per_step = rng.randint(1, 5)
    steps = rng.randint(1, 8)
    rows = rng.randint(1, 3)
    repeatable = rng.random() < 0.3
    kills = rng.random() < 0.5
    masks = seed % 3 == 0
    block = "trainer.async_training"
    config = replace_values(
        config,
        {
            f"{block}.max_staleness": k,
            f"{block}.repeatable": repeatable,
            f"{block}.group_deadline": 20.0,
            f"{block}.too_old": "mask" if masks else "drop",
            "data.train_batch_size": per_step,
            "actor_rollout_ref.rollout.n_agent": rows,
        },
    )
    trained = list[int]()
    prompts = Prompts(rows, trained)
    lost = 0.0 if repeatable else rng.choice([0.0, 0.05])

    def new() -> tuple[RolloutStream, Played]:
        played = Played(rng, rng.randint(1, 3), rng.choice([0.02, 0.2, 0.9]), lost)
        monkeypatch.setattr(stream_module.time, "monotonic", lambda: 1.0 + played.now)
        workers: Any = played
        collector: Any = prompts
        return RolloutStream(config, collector, workers, steps, lambda line: None), played

    stream, played = new()
    stream.send_weights(0, None)  # type: ignore[arg-type]
    saved = 0
    for step in range(1, steps + 1):
        extra = rng.choice([0, 0, rng.randint(1, 3)])  # groups that taught nothing and are replaced
        moments = played.now
        taken = [stream.take(per_step)]
        if extra:
            taken.append(stream.take(extra))
        assert played.now - moments < 2000, "it hangs"
        groups = stream.taken
        assert len(groups) == per_step + extra
        for group in groups:
            version = group.version_first
            assert version is not None and version < step and (masks or step - 1 - version <= k)
        for batch in taken:
            records = batch.non_tensor_batch["trajectory"]
            turns = [[turn["version_first"] for turn in record["turns"]] for record in records]
            is_young = np.array(turns) >= step - 1 - k
            assert is_young.all() if not masks else (batch.tensors["stale_mask"].numpy() == ~is_young).all()
            uids = batch.non_tensor_batch["uid"]
            assert all(is_young[uids == uid].any() for uid in set(uids))
            indices = batch.non_tensor_batch["index"]
            assert all(np.bincount(indices.astype(int))[np.unique(indices.astype(int))] == rows)
        trained += [int(group.prompts.non_tensor_batch["index"][0]) for group in groups]
        present = len(stream.running) + len(stream.ready)
        assert present <= min(k + step, steps) * per_step - (step - 1) * per_step - per_step
        stream.send_weights(step, None)  # type: ignore[arg-type]
        assert len(stream.running) + len(stream.ready) <= k * per_step + per_step
        if kills and rng.random() < 0.5:
            stream.save(folder, step_is_over=True)
            stream, played = new()
            stream.load(folder, step)
            stream.send_weights(step, None)  # type: ignore[arg-type]
            saved = step
    assert masks or not stream._sums["dropped"]
    live = [*stream.running.values(), *stream.ready, *stream.again]
    untrained = [int(group.prompts.non_tensor_batch["index"][0]) for group in live]
    assert sorted(trained + untrained) == list(range(prompts.drawn)), (seed, saved)  # none lost, none twice


@pytest.mark.parametrize("seeds", [range(150), pytest.param(range(150, 600), marks=pytest.mark.slow)])
def test_no_schedule_trains_what_is_too_old_or_loses_a_prompt_or_hangs(seeds, tmp_path, monkeypatch):
    config = load_config([])
    for seed in seeds:
        with monkeypatch.context() as patch:
            play(seed, config, tmp_path, patch)


def test_a_repeatable_run_trains_the_same_at_any_speed():
    for k in range(4):
        block = "trainer.async_training"
        settings = [f"{block}.max_staleness={k}", f"{block}.repeatable=true", "data.train_batch_size=3"]
        histories = []
        for seed, speed in enumerate((0.02, 0.3, 0.9)):
            prompts = Prompts(1)
            played = Played(random.Random(seed), 1 + seed % 2, speed)
            history = []
            tools: Any = load_config(settings), prompts, played, 6
            stream: Any = RolloutStream(*tools, lambda line: None)
            stream.send_weights(0, None)
            for step in range(1, 7):
                stream.take(3)
                if step in (2, 3):  # some groups taught nothing
                    stream.take(step)
                history.append([(group.number, group.version_first) for group in stream.taken])
                stream.send_weights(step, None)
            histories.append(history)
        assert histories[0] == histories[1] == histories[2]
        assert [version for _, version in histories[0][0]] == [0, 0, 0]
        assert all(0 <= 5 - version <= k for _, version in histories[0][-1])


def test_a_step_that_fails_leaves_its_prompts_to_be_asked_again(tmp_path, monkeypatch):
    config = load_config(["trainer.async_training.max_staleness=1", "data.train_batch_size=2"])
    prompts: Any = Prompts(1)
    played: Any = Played(random.Random(0), 1, 0.9)
    monkeypatch.setattr(stream_module.time, "monotonic", lambda: 1.0 + played.now)
    stream = RolloutStream(config, prompts, played, 3, lambda line: None)
    stream.send_weights(0, None)  # type: ignore[arg-type]
    stream.take(2)
    stream.save(tmp_path, step_is_over=False)
    other = RolloutStream(config, prompts, played, 3, lambda line: None)
    other.load(tmp_path, 0)
    played.rows = []
    other.send_weights(0, None)  # type: ignore[arg-type]
    live = [*other.running.values(), *other.ready, *other.again]
    indices = sorted(int(group.prompts.non_tensor_batch["index"][0]) for group in live)
    assert indices == list(range(prompts.drawn)) == [0, 1, 2, 3]


def test_weights_that_did_not_arrive_end_the_run():
    """Nobody waits for the processes; the next look at them says what has gone wrong."""
    config = load_config(["trainer.async_training.max_staleness=1", "data.train_batch_size=2"])
    prompts: Any = Prompts(1)
    played: Any = Played(random.Random(0), 1, 0.0)
    stream = RolloutStream(config, prompts, played, 3, lambda line: None)
    stream.send_weights(0, None)  # type: ignore[arg-type]
    played.load_weights = lambda weights, version: Sent(MemoryError("no room for weights"))
    stream.send_weights(1, None)  # type: ignore[arg-type]
    with pytest.raises(MemoryError, match="no room"):
        stream.take(2)
    stream.send_weights(1, None)  # type: ignore[arg-type]
    with pytest.raises(MemoryError, match="no room"):
        stream.settle()


def test_what_staleness_has_room_for_is_begun_and_no_more(monkeypatch):
    config = load_config(["trainer.async_training.max_staleness=1", "data.train_batch_size=2"])
    prompts: Any = Prompts(1)
    played: Any = Played(random.Random(0), 1, 0.9)
    monkeypatch.setattr(stream_module.time, "monotonic", lambda: 1.0 + played.now)
    stream: Any = RolloutStream(config, prompts, played, 3, lambda line: None)
    assert stream.room() == 4
    stream.send_weights(0, None)
    assert len(stream.running) == prompts.drawn == 4 and stream.room() == 0
    stream.take(2)
    assert prompts.drawn == 4 and stream.room() == 0
    stream.take(1)  # one of the two taught nothing
    assert prompts.drawn == 5 and stream.room() == 0
    stream.version = 1
    stream.taken = []
    stream.replaced = 0
    assert stream.room() == 2
    stream.version = 2  # the last step begins
    assert stream.room() == 0


def test_the_gate_counts_and_nothing_else():
    gate = StalenessGate(max_staleness=1, groups_per_step=2, num_steps=10)
    assert [gate.room(0, present) for present in (0, 3, 4, 5)] == [4, 1, 0, 0]
    assert [gate.room(version, 0) for version in (8, 9, 10)] == [4, 2, 0] and gate.oldest(5) == 4
    assert [gate.due(5, present) for present in (-3, 0, 1, 2, 3)] == [5, 5, 5, 6, 6]
    assert gate.leaves_time(5, []) and gate.leaves_time(5, [6, 7, 7, 6]) and gate.leaves_time(5, [8, 7, 8, 8])
    assert not gate.leaves_time(5, [5]) and not gate.leaves_time(5, [6, 6, 6])
