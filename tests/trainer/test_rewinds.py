"""A run that collapsed goes back to before it, with a smaller rate, and keeps both branches."""

from __future__ import annotations

import json

import pytest
from test_restarts import CountingTrainer, settings

from verl.checkpoints.run_state import CheckpointStore, RunState, RunStopped
from verl.config import load_config
from verl.records import RunRecorder
from verl.trainer.ppo.health import HealthFinding
from verl.trainer.restarts import RestartingRun
from verl.trainer.rewinds import (
    CollapseSeen,
    Rewind,
    note_rewind,
    rewinds_before,
    step_before,
    with_remedies,
)

RATE = "actor_rollout_ref.actor.optim.lr"


def finding(onset: int) -> HealthFinding:
    return HealthFinding("no_answers", f"since step {onset} fewer trajectories end.", onset, is_collapse=True)


class Collapsing(CountingTrainer):
    """Counts, and collapses at the step that its number of rewinds names, as long as it may go back."""

    def __init__(self, config, collapses) -> None:
        super().__init__(config, steps=12)
        self.collapses = collapses  # (onset, seen at) for each number of rewinds
        self.num_rewinds = 0
        self.rewinds_left = 0
        self.recorder = RunRecorder(config, total_steps=12)

        self.when_folder_is_taken = lambda: None

    def init_workers(self) -> None:
        super().init_workers()
        self.when_folder_is_taken()

    def at_collapse(self, step: int) -> None:
        onset, seen = self.collapses.get(self.num_rewinds, (0, 0))
        if step == seen and (self.rewinds_left or self.config.trainer.on_collapse == "stop"):
            raise CollapseSeen(step, finding(onset))

    def fit(self) -> None:
        first = 0 if self.resume_folder is None else RunState.load(self.resume_folder).step
        self.recorder.start(first, self.resume_folder)
        for step in range(first + 1, self.steps + 1):
            self.done.append(step)
            self.recorder.write(step, {"lr": self.config.actor_rollout_ref.actor.optim.lr})
            if step % 3 == 0:
                RunState(step=step).save(self.checkpoints.begin(step))
                self.checkpoints.commit(step)
            self.at_collapse(step)


def run_of(run_dir, collapses, **values):
    defaults = {"backend": "local", "on_collapse": "rewind"}
    config = settings(run_dir, **defaults | values)
    made = []

    def build(config):
        made.append(Collapsing(config, collapses))
        return made[-1]

    return RestartingRun(config, build), made


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_goes_back_to_the_newest_checkpoint_from_before_the_onset_at_half_the_rate(tmp_path, capsys):
    run, trainers = run_of(tmp_path, {0: (7, 10)})
    run.start()
    run.fit()
    run.shutdown()
    assert [trainer.done for trainer in trainers] == [list(range(1, 11)), [7, 8, 9, 10, 11, 12]]
    first, second = (trainer.config.actor_rollout_ref.actor for trainer in trainers)
    assert second.optim.lr == first.optim.lr / 2
    assert (first.max_step_kl, second.max_step_kl) == (None, 0.01)
    (record,) = lines(tmp_path / "restarts.jsonl")
    assert (record["rewind"], record["at_step"], record["from_step"], record["onset"]) == (1, 10, 6, 7)
    assert record["remedy"][RATE] == second.optim.lr
    said = capsys.readouterr().out
    assert "rewind 1 of 2" in said and "goes on from the checkpoint of step 6 with" in said


def test_both_branches_stay_in_the_records(tmp_path):
    run, _ = run_of(tmp_path, {0: (7, 10)})
    run.start()
    run.fit()
    run.shutdown()
    kept = lines(tmp_path / "metrics.jsonl")
    left = lines(tmp_path / "branches/1/metrics.jsonl")
    assert [row["step"] for row in kept] == list(range(1, 13))
    assert [row["step"] for row in left] == [7, 8, 9, 10]
    rate = kept[0]["lr"]
    assert [row["lr"] for row in kept] == [rate] * 6 + [rate / 2] * 6
    assert [row["lr"] for row in left] == [rate] * 4
    assert (tmp_path / "global_step_9.old-1").is_dir() and (tmp_path / "global_step_9").is_dir()


def test_each_rewind_halves_the_rate_and_the_bound_again_until_none_is_left(tmp_path):
    collapses = {0: (7, 10), 1: (4, 8), 2: (5, 9)}
    run, trainers = run_of(tmp_path, collapses, max_rewinds=2)
    run.start()
    run.fit()
    run.shutdown()
    assert [trainer.done[0] for trainer in trainers] == [1, 7, 4] and trainers[-1].done[-1] == 12
    actor = trainers[-1].config.actor_rollout_ref.actor
    assert actor.optim.lr == trainers[0].config.actor_rollout_ref.actor.optim.lr / 4
    assert actor.max_step_kl == 0.005


def test_a_run_without_a_checkpoint_from_before_the_onset_begins_again(tmp_path):
    run, trainers = run_of(tmp_path, {0: (2, 5)})
    run.start()
    run.fit()
    run.shutdown()
    assert trainers[1].done == list(range(1, 13))
    assert lines(tmp_path / "restarts.jsonl")[0]["from_step"] == 0


@pytest.mark.parametrize("mode", ["auto", "latest"])
def test_a_run_that_is_started_again_goes_on_with_the_remedies(tmp_path, mode):
    run, _ = run_of(tmp_path, {0: (7, 10)})
    run.start()
    run.fit()
    run.shutdown()
    again, trainers = run_of(tmp_path, {}, resume_mode=mode)
    again.start()
    again.shutdown()
    assert trainers[0].num_rewinds == 1 and trainers[0].rewinds_left == 1
    assert trainers[0].config.actor_rollout_ref.actor.max_step_kl == 0.01


def test_a_run_that_is_killed_before_the_line_is_written_makes_the_same_rewind_again(tmp_path, monkeypatch):
    run, _ = run_of(tmp_path, {0: (7, 10)})
    monkeypatch.setattr("verl.trainer.restarts.note_rewind", lambda *arguments: exit(9))
    run.start()
    with pytest.raises(SystemExit):
        run.fit()
    run.shutdown()
    monkeypatch.undo()
    again, trainers = run_of(tmp_path, {0: (7, 10)})
    again.start()
    again.fit()
    again.shutdown()
    assert [trainer.done for trainer in trainers] == [[7, 8, 9, 10], [7, 8, 9, 10, 11, 12]]
    assert [line["from_step"] for line in lines(tmp_path / "restarts.jsonl")] == [6]


def test_a_new_start_and_an_earlier_checkpoint_know_nothing_of_later_rewinds(tmp_path):
    note_rewind(tmp_path, Rewind(1, 30, 20, 25, "lost"), {})
    note_rewind(tmp_path, Rewind(2, 60, 40, 50, "lost"), {})
    assert [rewind.number for rewind in rewinds_before(tmp_path, 19)] == []
    assert [rewind.number for rewind in rewinds_before(tmp_path, 20)] == [1]
    assert [rewind.number for rewind in rewinds_before(tmp_path, 45)] == [1, 2]
    note_rewind(tmp_path, Rewind(3, 50, 10, 15, "lost"), {})  # further back than both
    assert [rewind.number for rewind in rewinds_before(tmp_path, 10)] == [1, 2, 3]
    note_rewind(tmp_path, Rewind(1, 9, 5, 7, "lost"), {})  # after the run was put back to step 3
    assert [rewind.number for rewind in rewinds_before(tmp_path, 12)] == [1]
    run, trainers = run_of(tmp_path, {}, resume_mode="none")
    run.start()
    run.shutdown()
    assert trainers[0].num_rewinds == 0


def test_with_stop_the_run_ends_with_the_line_and_no_rewind(tmp_path):
    run, trainers = run_of(tmp_path, {0: (7, 10)}, on_collapse="stop")
    run.start()
    with pytest.raises(RunStopped, match="step 10: since step 7 fewer trajectories end"):
        run.fit()
    run.shutdown()
    assert len(trainers) == 1 and not (tmp_path / "restarts.jsonl").exists()


def test_a_smaller_bound_of_ones_own_is_kept():
    config = load_config(
        ["actor_rollout_ref.actor.max_step_kl=0.002", f"{RATE}=8e-4", "critic.optim.lr=1e-3"]
    )
    config = with_remedies(config, [Rewind(1, 9, 6, 7, "lost")])
    actor = config.actor_rollout_ref.actor
    assert (actor.max_step_kl, actor.optim.lr, config.critic.optim.lr) == (0.002, 4e-4, 5e-4)


def test_a_run_from_another_runs_checkpoint_goes_back_to_it_or_stops_if_that_is_too_late(tmp_path):
    other = CheckpointStore(tmp_path / "other", None)
    RunState(step=5).save(other.begin(5))
    other.commit(5)
    start = {"resume_mode": "from_path", "resume_from_path": str(other.folder(5))}
    run, trainers = run_of(tmp_path / "run", {0: (6, 8)}, **start)
    run.start()
    run.fit()
    run.shutdown()
    assert [trainer.done[0] for trainer in trainers] == [6, 6] and trainers[1].done[-1] == 12
    late, trainers = run_of(tmp_path / "late", {0: (4, 8)}, **start)
    late.start()
    with pytest.raises(RunStopped, match="of step 5, is not from before step 4"):
        late.fit()
    late.shutdown()
    assert len(trainers) == 1 and not (tmp_path / "late/restarts.jsonl").exists()


@pytest.mark.parametrize("every", [1, 2, 3, 10])
def test_a_run_that_may_go_back_keeps_a_checkpoint_that_is_twenty_steps_old(tmp_path, every):
    store = CheckpointStore(tmp_path, 2, keep_behind=20)
    for step in range(every, 90, every):
        RunState(step=step).save(store.begin(step))
        store.commit(step)
        kept = store.steps()
        assert len(kept) <= 7
        if step >= 20 + every:
            assert any(step - 35 <= old <= step - 20 for old in kept), (step, kept)


def test_the_checkpoint_of_the_onsets_own_step_is_not_from_before_it(tmp_path):
    store = CheckpointStore(tmp_path, None)
    for step in (3, 6, 9):
        RunState(step=step).save(store.begin(step))
        store.commit(step)
    assert [step_before(store, onset, 0) for onset in (3, 4, 6, 7, 20)] == [0, 3, 3, 6, 9]
