"""Whole runs that collapse: the monitor sees it, and the run goes back, with workers that answer at once."""

from __future__ import annotations

import json

import pytest
from instant_runs import Policy, instant_trainer
from test_whole_runs import rows_of

from verl.config import load_config
from verl.trainer.restarts import RestartingRun
from verl.trainer.rewinds import CollapseSeen

STEPS = 30
ONSET = 13
SETTINGS = (
    f"trainer.total_training_steps={STEPS}",
    "trainer.save_freq=4",
    "trainer.max_ckpt_to_keep=null",
)


@pytest.fixture
def collapse(monkeypatch):
    """The policy of the first trainer gives wrong answers alone from step ONSET on."""
    trajectory = Policy._trajectory
    state = {"trainers": 0, "onset": ONSET}

    def collapsing(self, row, prompt_ids, seed):
        is_lost = state["trainers"] == 1 and len(Policy.asked) >= state["onset"]
        self.answers = [self.answers[0]] * 2 if is_lost else self.answers
        return trajectory(self, row, prompt_ids, seed)

    monkeypatch.setattr(Policy, "_trajectory", collapsing)
    return state


def fit(folder, state, *settings):
    config = load_config([*settings, f"trainer.default_local_dir={folder}", "trainer.backend=local"])

    def build(config):
        state["trainers"] += 1
        mode = f"trainer.resume_mode={config.trainer.resume_mode}"
        return instant_trainer(folder, *SETTINGS, *settings, mode, tokens=300)

    run = RestartingRun(config, build)
    try:
        run.start()
        run.fit()
    finally:
        run.shutdown()


def test_a_run_that_was_rewound_ends_as_one_that_never_collapsed(tmp_path, collapse, capsys):
    fit(tmp_path / "run", collapse, "trainer.on_collapse=rewind")
    (record,) = [json.loads(line) for line in (tmp_path / "run/restarts.jsonl").read_text().splitlines()]
    assert record["from_step"] == 12 and ONSET - 1 <= record["onset"] <= ONSET + 1
    assert record["at_step"] <= record["onset"] + 10
    said = capsys.readouterr().out
    assert f"warning, step {record['at_step']}: " in said and "rewind 1 of 2" in said

    (tmp_path / "healthy").mkdir()
    fit(tmp_path / "healthy/run", collapse, "trainer.on_collapse=warn")
    rewound, healthy = (rows_of(tmp_path / name) for name in ("run", "healthy/run"))
    assert [row.pop("trainer/num_rewinds") for row in rewound] == [0] * 12 + [1] * (STEPS - 12)
    assert rewound == healthy
    left = rows_of(tmp_path / "run/branches/1")
    assert [row["step"] for row in left] == list(range(13, record["at_step"] + 1))


def test_a_warning_alone_lets_the_run_go_on_to_its_end(tmp_path, collapse, capsys):
    fit(tmp_path / "run", collapse, "trainer.on_collapse=warn")
    assert not (tmp_path / "run/restarts.jsonl").exists()
    assert rows_of(tmp_path / "run")[-1]["step"] == STEPS and "no longer" in capsys.readouterr().out


def test_a_stopped_run_names_the_checkpoint_from_before_and_stops_again_when_it_is_started(
    tmp_path, collapse
):
    for _ in range(2):
        with pytest.raises(
            CollapseSeen, match=r"on_collapse=stop.*resume_from_path=.*global_step_12\.$"
        ) as stop:
            fit(tmp_path / "run", collapse, "trainer.on_collapse=stop")
        assert stop.value.step < STEPS
        collapse |= {"trainers": 0, "onset": 0}  # the second run goes on from a checkpoint after the onset
