"""Random schedules for a rollout engine, and what each session would have sampled alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from context_runner import VOCAB, ContextRunner, logits, terms
from torch import Tensor

from verl.sessions.engine_contract import Completion, SamplingParams
from verl.workers.rollout.native import NativeEngine, native_engine
from verl.workers.rollout.native.cpu_sampler import draw
from verl.workers.rollout.native.runner import PagedRunner
from verl.workers.rollout.sampler import SamplingRows, uniforms


@dataclass
class Turn:
    """One turn as the owner sees it: where its sampled tokens begin, and what came.

    `weights` holds (tokens sampled before, version) of the weights at its start and of every later update.
    """

    start: int
    params: SamplingParams
    weights: list[tuple[int, int]]
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    model_log_probs: list[float] | None = None  # not known of turns that were closed before their end
    completion: Completion | None = None


@dataclass
class Trajectory:
    """A session's tokens without those of a turn under way, and its turns."""

    tokens: list[int]
    turns: list[Turn]
    active: bool = True


class Schedule:
    """Plays the owner of an engine at random; everything follows from the seed.

    Args of the constructor:
        make_runner: by block size and max_model_len.
        weights: what `load_weights` is given, by version.
        greedy: no sampling.
    """

    def __init__(
        self,
        seed: int,
        make_runner: Callable[[int, int], PagedRunner | ContextRunner] = lambda block_size, _: ContextRunner(
            block_size
        ),
        weights: Callable[[int], Iterable[tuple[str, Tensor]]] = lambda v: [("version", torch.tensor(v))],
        greedy: bool = False,
    ) -> None:
        self.rng = rng = random.Random(seed)
        self.max_model_len = rng.randint(4, 32)
        block_size = rng.choice([1, 2, 3, 4, 8, 16])
        per_sequence = -(-self.max_model_len // block_size)
        runner = make_runner(block_size, self.max_model_len)
        self.runner = runner
        self.weights = weights
        num_blocks = int(per_sequence * rng.choice([1, 1, 1.3, 1.6, 3]))
        budget = None if rng.random() < 0.2 else num_blocks * runner.bytes_per_block
        with patch.object(native_engine, "PagedRunner", lambda *_: runner):
            self.engine = NativeEngine(
                None,
                rng.randint(1, 6),
                self.max_model_len,
                kv_budget_bytes=budget,
                max_prefill_tokens=rng.choice([1, 2, 3, 7, 16, 100]),
                block_size=block_size,
            )
        stem = [rng.randrange(VOCAB) for _ in range(rng.randint(0, self.max_model_len // 2))]
        ends = [stem[: rng.randint(0, len(stem))] + self._some(1, self.max_model_len // 3) for _ in range(3)]
        self.prompts = [prompt[: self.max_model_len - 1] for prompt in ends]
        self.observations = [self._some(0, 9) for _ in range(2)]
        self.temperatures = [0.0] if greedy else [0.0, 1.0, 1.0]
        self.version = 0
        self.progress = 0.0
        self.asleep = False
        self.live: dict[int, Trajectory] = {}
        self.closed: list[Trajectory] = []
        self._update()

    def run(self) -> None:
        """Some random events; then everything ends, and nothing may be left."""
        rng = self.rng
        events = [self._open, self._resume, self._close, self._update, self._sleep, self._fail, self._step]
        for event in rng.choices(events, [3, 5, 1, 0.4, 0.4, 0.2, 12], k=rng.randint(5, 25)):
            event()
        self._finish()
        for _ in range(rng.choice([0, 1, 2])):
            self._resume()
            self._resume()
            self._finish()
        for session_id in list(self.live):
            self._forget(session_id)
        stats = self.engine.stats()
        assert (stats["running"], stats["queued"], stats["parked"], stats["kv_bytes"]) == (0, 0, 0, 0)
        scheduler = self.engine._scheduler
        assert not any(scheduler.pool._counts)
        assert sorted(scheduler._free_slots) == list(range(self.engine.max_num_seqs))
        assert not scheduler._idle and not len(scheduler._decoding)

    def _finish(self) -> None:
        """Let all turns end; asleep engines wake up."""
        if self.asleep:
            self._wake()
        most = 100 * (1 + sum(t.active for t in self.live.values())) * self.max_model_len
        while self.engine.has_runnable:
            self._step()
            most -= 1
            assert most, "no end"

    # ---- events ----

    def _some(self, least: int, most: int) -> list[int]:
        return [self.rng.randrange(VOCAB) for _ in range(self.rng.randint(least, max(least, most)))]

    def _params(self) -> SamplingParams:
        rng = self.rng
        eos = frozenset([rng.randrange(VOCAB)] if rng.random() < 0.3 else [])
        params = SamplingParams(
            rng.randint(1, 8), rng.choice(self.temperatures), seed=rng.choice([0, 1, -1]), eos_token_ids=eos
        )
        if params.temperature and rng.random() < 0.1:
            params = replace(params, temperature=0.7, top_k=rng.randint(1, 4), top_p=0.9)
        return params

    def _open(self) -> None:
        if len(self.live) > 12:
            return
        prompt = self.rng.choice(self.prompts)
        alike = self._params() if self.rng.random() < 0.3 else None  # so that whole trajectories are equal
        for _ in range(self.rng.choice([1, 1, 2, 4])):
            params = alike or self._params()
            session_id = self.engine.open(prompt, params)
            self.live[session_id] = Trajectory(list(prompt), [Turn(len(prompt), params, [(0, self.version)])])

    def _resume(self) -> None:
        parked = [session_id for session_id, trajectory in self.live.items() if not trajectory.active]
        if not parked:
            return
        params = self._params()
        observation = self.rng.choice([*self.observations, self._some(0, 5)])
        for session_id in self.rng.sample(parked, self.rng.choice([1, 1, len(parked)])):
            self.engine.resume(session_id, observation, params)
            trajectory = self.live[session_id]
            trajectory.tokens += observation
            trajectory.turns.append(Turn(len(trajectory.tokens), params, [(0, self.version)]))
            trajectory.active = True

    def _close(self) -> None:
        if self.live:
            self._forget(self.rng.choice(list(self.live)))

    def _forget(self, session_id: int) -> None:
        trajectory = self.live.pop(session_id)
        partial = self.engine.partial(session_id)
        if trajectory.active:
            turn = trajectory.turns[-1]
            turn.tokens = partial.token_ids
            turn.log_probs = partial.log_probs
            trajectory.tokens += turn.tokens
            if turn.tokens:
                assert partial.version_first == versions(turn)[0]
        else:
            assert partial == ([], [], None)
        self.closed.append(trajectory)
        self.engine.close(session_id)

    def _update(self) -> None:
        self.version += 1
        for session_id, trajectory in self.live.items():
            if trajectory.active:
                sampled = len(self.engine.partial(session_id).token_ids)
                trajectory.turns[-1].weights.append((sampled, self.version))
        self.engine.load_weights(self.weights(self.version), self.version)

    def _sleep(self) -> None:
        level = self.rng.choice([1, 2])
        self.engine.sleep(level)
        self.asleep = True
        if level == 2:
            assert self.engine.version == -1
        if self.rng.random() < 0.7:
            self._wake()

    def _wake(self) -> None:
        self.engine.wake()
        self.asleep = False
        if self.engine.version == -1:
            self._update()

    def _fail(self) -> None:
        """A step of the model that fails: as if it had not been tried."""
        running = any(trajectory.active and self._has_room(trajectory) for trajectory in self.live.values())
        if self.asleep or not running or not isinstance(self.runner, ContextRunner):
            return
        self.runner.fails = True
        with pytest.raises(RuntimeError, match="as asked"):
            self.engine.step()
        stats = self.engine.stats()
        assert stats["running"] == stats["kv_bytes"] == 0 and self.engine.has_runnable

    def _has_room(self, trajectory: Trajectory) -> bool:
        return trajectory.turns[-1].start < self.max_model_len

    def _step(self) -> None:
        if self.asleep:
            return
        active = sum(trajectory.active for trajectory in self.live.values())
        assert self.engine.has_runnable == (active > 0)
        completions = self.engine.step()
        stats = self.engine.stats()
        before = self.progress
        self.progress = stats["generated_tokens"] + stats["prefilled_tokens"]
        assert completions or self.progress > before or not active, "a step did nothing"
        for completion in completions:
            trajectory = self.live[completion.session_id]
            turn = trajectory.turns[-1]
            assert trajectory.active
            trajectory.active = False
            turn.completion = completion
            turn.tokens = completion.token_ids
            turn.log_probs = completion.log_probs
            turn.model_log_probs = completion.model_log_probs
            trajectory.tokens += turn.tokens
            self._check_end(turn)

    def _check_end(self, turn: Turn) -> None:
        room = min(turn.params.max_tokens, self.max_model_len - turn.start)
        ending = [token in turn.params.eos_token_ids for token in turn.tokens]
        assert not any(ending[:-1])
        assert turn.completion is not None
        if ending and ending[-1]:
            assert turn.completion.finish_reason == "eos"
        else:
            assert turn.completion.finish_reason == "length" and len(turn.tokens) == max(room, 0)
        got = turn.completion.version_first, turn.completion.version_last
        expected = versions(turn)
        assert got == ((expected[0], expected[-1]) if expected else (self.version, self.version))


def versions(turn: Turn) -> list[int]:
    """Of the weights that each token of a turn was sampled with."""
    return [
        next(version for before, version in reversed(turn.weights) if before <= index)
        for index in range(len(turn.tokens))
    ]


def check_alone(trajectories: list[Trajectory]) -> int:
    """Sample each session alone, token by token, and compare; the number of tokens compared.

    A plain reference needs no loop here: if every token is what the model alone samples after the tokens
    before it, the whole is.
    """
    hashes = []
    weights = []
    seeds = []
    counters = []
    turns = [(trajectory, turn) for trajectory in trajectories for turn in trajectory.turns]
    for trajectory in trajectories:
        tokens = np.array(trajectory.tokens, dtype=np.int64)
        running = np.cumsum(terms(tokens, np.arange(len(tokens))))
        done = 0
        for turn in trajectory.turns:
            count = len(turn.tokens)
            assert turn.tokens == trajectory.tokens[turn.start : turn.start + count]
            assert len(turn.log_probs) == count
            hashes.append(running[turn.start - 1 : turn.start - 1 + count])
            weights += versions(turn)
            seeds += [turn.params.seed & (2**64 - 1)] * count
            counters += range(done, done + count)
            done += count
    if not seeds:
        return 0
    of_params = [
        (p.temperature, max(p.top_k, 0), p.top_p, p.min_p)
        for p, count in ((turn.params, len(turn.tokens)) for _, turn in turns)
        for _ in range(count)
    ]
    temperature, top_k, top_p, min_p = (np.array(column) for column in zip(*of_params, strict=True))
    uniform = uniforms(np.array(seeds, dtype=np.uint64), np.array(counters, dtype=np.uint64))
    rows = SamplingRows(temperature, top_k, top_p, min_p, uniform)
    sampled, log_probs, model_log_probs = draw(logits(np.concatenate(hashes), np.array(weights)), rows)
    assert sampled.tolist() == [token for _, turn in turns for token in turn.tokens]
    assert log_probs.tolist() == [value for _, turn in turns for value in turn.log_probs]
    first = 0
    for _, turn in turns:
        if turn.model_log_probs is not None:
            assert model_log_probs[first : first + len(turn.tokens)].tolist() == turn.model_log_probs
        first += len(turn.tokens)
    return first
