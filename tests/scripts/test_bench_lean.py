"""scripts/bench_lean.py: which lengths rollouts ahead of training leave out, on a simulated clock."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))
from scripts import bench_lean  # noqa: E402
from scripts.bench_lean import Lengths, SimulatedPrompts, SimulatedRollouts, settings_of, simulate  # noqa: E402
from verl.trainer.ppo.stream import RolloutStream  # noqa: E402


class OneIsSlow(Lengths):
    """Group 1 takes nine times as long as any other."""

    def of(self, number: int, attempt: int) -> float:
        return 9.0 if number == 1 else 1.0


def stream_of(
    ahead: int, groups: int, num_steps: int, lengths: Lengths | None = None
) -> tuple[Any, SimulatedRollouts]:
    """Return a stream that has begun its first groups, and its simulated processes."""
    rollouts = SimulatedRollouts(lengths or Lengths(0, 1.0))
    tools: Any = settings_of(ahead, groups, "drop"), SimulatedPrompts(), rollouts, num_steps
    stream: Any = RolloutStream(*tools, lambda line: None)
    stream.send_weights(0, None)
    return stream, rollouts


@pytest.mark.parametrize("ahead", [1, 2, 4, 8])
def test_slow_groups_are_trained_as_often_as_they_are_sampled(ahead):
    outcome = simulate("in time", ahead, update=0.25, steps=30, groups=4)
    assert outcome.lean == pytest.approx(1.0, abs=1e-3)  # lengths are rounded to tokens
    assert outcome.metric == 1.0 and outcome.dropped == 0.0


def test_batches_that_wait_for_no_group_lean_and_the_metric_tells_so():
    for kind in ("ready first", "masked"):
        outcome = simulate(kind, 2, update=0.25, steps=60, groups=8)
        assert outcome.lean < 0.85 and outcome.metric < 0.85 and outcome.dropped > 0.0, kind


def test_the_first_batches_do_not_choose_the_shortest_groups_either():
    stream, _ = stream_of(ahead=3, groups=2, num_steps=9)
    for step in range(1, 5):
        stream.take(2)
        assert [group.number for group in stream.taken] == [2 * step - 2, 2 * step - 1]
        stream.send_weights(step, None)


def test_groups_that_replace_others_are_those_that_are_ready_first():
    """They need not be waited for, as they come on top of the share of a step."""
    stream, rollouts = stream_of(1, 1, 9, OneIsSlow(0, 1.0))
    stream.take(1)  # group 0
    stream.take(1)  # it taught nothing
    assert [group.number for group in stream.taken] == [0, 2] and rollouts.now == 2.0
    stream.send_weights(1, None)
    stream.take(1)
    assert [group.number for group in stream.taken] == [1] and rollouts.now == 9.0


def test_a_group_that_goes_on_after_a_checkpoint_is_due_when_it_was_before(tmp_path):
    """A younger group that is ready already does not take its turn."""
    stream, rollouts = stream_of(2, 1, 9, OneIsSlow(0, 1.0))
    rollouts.continuations = lambda: []  # type: ignore[attr-defined]
    stream.take(1)
    stream.send_weights(1, None)
    assert [group.number for group in stream.ready] == [2]
    stream.save(tmp_path, step_is_over=True)
    other, _ = stream_of(2, 1, 9, OneIsSlow(0, 1.0))
    other.running.clear()
    other.load(tmp_path, 1)
    other._begin()
    groups = [*other.ready, *other.running.values()]
    assert {group.number: group.due for group in groups} == {1: 1, 2: 2, 3: 3}


def test_the_table_has_a_line_for_each_run(monkeypatch, capsys):
    arguments = ["bench_lean.py", "--ahead", "1", "--update", "0.5", "--steps", "9", "--groups", "2"]
    monkeypatch.setattr(sys, "argv", arguments)
    bench_lean.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[2] for line in lines[2:]] == list(bench_lean.KINDS)
