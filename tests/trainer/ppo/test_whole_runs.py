"""What a run keeps, refuses and says, with the real trainer and workers that answer at once."""

from __future__ import annotations

import json
import os
import re
import signal
import time

import pytest
from instant_runs import Critic, Policy, documented_metrics, instant_trainer, run

from verl.checkpoints.run_state import CheckpointStore, RunState, RunStopped
from verl.trainer.ppo.scoring import RewardManager
from verl.trainer.ppo.stop_request import StoppedOnRequest, StopRequest
from verl.utils.reward_score import load_reward_function

STEPS = "trainer.total_training_steps=4"


def rows_of(folder):
    """The metrics of each step that can be repeated."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in line.items() if not name.startswith(("timing", "perf/", "val"))}
        for line in lines
    ]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    run(instant_trainer(folder, STEPS))
    return rows_of(folder), Policy.asked


def test_a_dead_retriever_keeps_the_steps_that_are_done(tmp_path, undisturbed):
    """Without a checkpoint every so many steps: it is written when the searches of step 3 fail."""
    trainer = instant_trainer(tmp_path / "run", STEPS)
    Policy.answered = 2
    with pytest.raises(RunStopped, match="after step 2 32 of 32 trajectories .* goes on from step 2"):
        run(trainer)
    assert trainer.checkpoints.steps() == [2]
    run(instant_trainer(tmp_path / "run", STEPS))
    assert rows_of(tmp_path / "run") == undisturbed[0]
    assert Policy.asked == undisturbed[1][2:]  # the prompts that step 3 had taken are asked again


def test_a_retriever_that_dies_in_a_validation_keeps_the_step_as_well(tmp_path, undisturbed):
    trainer = instant_trainer(tmp_path / "run", STEPS, "trainer.test_freq=2")
    Policy.answered = 2
    with pytest.raises(RunStopped, match="goes on from step 2"):
        run(trainer)
    assert [row["step"] for row in rows_of(tmp_path / "run")] == [1, 2]
    run(instant_trainer(tmp_path / "run", STEPS))
    assert rows_of(tmp_path / "run") == undisturbed[0]


def test_the_last_validation_is_made_up_for(tmp_path):
    Policy.answered = None
    trainer = instant_trainer(tmp_path / "run", "trainer.total_training_steps=1")
    Policy.answered = 1
    with pytest.raises(RunStopped, match="goes on from step 1"):
        run(trainer)
    summary = run(instant_trainer(tmp_path / "run", "trainer.total_training_steps=1"))
    assert summary["steps"] == 1 and summary["em_after"] is not None


def test_a_request_to_stop_ends_the_run_after_its_step_with_a_checkpoint(tmp_path, undisturbed):
    trainer = instant_trainer(tmp_path / "run", STEPS)
    trainer.stop_request.asked = True
    with pytest.raises(StoppedOnRequest, match="the checkpoint of step 1 is written, and the same command"):
        run(trainer)
    run(instant_trainer(tmp_path / "run", STEPS))
    assert rows_of(tmp_path / "run") == undisturbed[0]


def test_a_first_ctrl_c_asks_and_says_so_and_a_second_one_ends_the_run_at_once(capsys):
    before = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGUSR1)]
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        request = StopRequest().listen()
        with pytest.raises(KeyboardInterrupt):  # nothing to keep before the first step
            signal.raise_signal(signal.SIGINT)
        request.step = 7
        signal.raise_signal(signal.SIGINT)
        assert request.asked
        said = capsys.readouterr().out
        assert "after step 7, with a checkpoint" in said and "the same command goes on" in said
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert request.what_is_kept() == "step 7 is lost; the same command goes on from the last checkpoint"
        request = StopRequest().listen()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert request.asked
    finally:
        for number, handler in before:
            signal.signal(number, handler)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (["algorithm.adv_estimator=rloo"], "algorithm.adv_estimator=grpo (now rloo)"),
        (["reward_model.search_cost=0.5"], "reward_model.search_cost=0.0 (now 0.5)"),
        (["actor_rollout_ref.model.lora_rank=8"], "actor_rollout_ref.model.lora_rank=0 (now 8)"),
        ([], "questions.parquet (what it names was changed since)"),
    ],
)
def test_a_run_does_not_go_on_with_settings_that_it_did_not_begin_with(tmp_path, settings, named):
    first = instant_trainer(tmp_path / "run", "trainer.total_training_steps=1")
    run(first)
    if not settings:
        (tmp_path / "questions.parquet").write_bytes(b"QUESTIONS")  # of the same length
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*") if path.is_file()}
    other = instant_trainer(tmp_path / "run", STEPS, *settings)
    with pytest.raises(ValueError) as error:
        run(other)
    said = str(error.value)
    assert named in said and "trainer.resume_mode=none" in said and "EXPERIMENT_NAME" in said
    before.pop(tmp_path / "run" / "run.lock")
    assert {path: path.stat().st_mtime_ns for path in before} == before  # nothing is rewritten


def test_a_longer_run_or_another_learning_rate_is_the_same_run(tmp_path):
    run(instant_trainer(tmp_path / "run", "trainer.total_training_steps=1"))
    longer = ["trainer.total_training_steps=2", "actor_rollout_ref.actor.optim.lr=3e-6"]
    assert run(instant_trainer(tmp_path / "run", *longer))["steps"] == 2


def test_the_checkpoint_is_chosen_when_no_other_run_can_write_one(tmp_path):
    trainer = instant_trainer(tmp_path / "run", STEPS)  # built while another run is about to end
    store = CheckpointStore(tmp_path / "run", None)
    RunState(step=3).save(store.begin(3))
    store.commit(3)
    try:
        trainer.init_workers()
        assert trainer.resume_folder == store.folder(3)
    finally:
        trainer.shutdown()


def test_a_reward_function_that_raises_is_one_line_with_its_own_last_frame(tmp_path):
    file = tmp_path / "my_reward.py"
    file.write_text("import json\n\ndef score(**fields):\n    return json.loads('{broken')\n")
    trainer = instant_trainer(tmp_path / "run", STEPS)
    function = load_reward_function({"path": str(file), "name": "score"})
    trainer.reward_fn = RewardManager(trainer.tokenizer, compute_score=function)
    with pytest.raises(RunStopped) as error:
        run(trainer)
    said = str(error.value)
    assert said.startswith(
        f"the reward function failed: {file}, line 4, in score: JSONDecodeError: Expecting"
    )
    assert "\n" not in said


def test_a_run_says_what_it_is_and_that_the_critic_comes_first(tmp_path, capsys):
    run(
        instant_trainer(
            tmp_path / "run", "trainer.critic_warmup=1", "retriever.url=http://a:1/r", algorithm="ppo"
        )
    )
    said = capsys.readouterr().out
    for line in (
        "model: ",
        "data: 32 training and 2 validation",
        "algorithm: gae",
        "batch: 4 questions with 8",
    ):
        assert line in said
    assert f"folder: {tmp_path / 'run'}" in said and "retriever: http://a:1/r" in said
    assert "the first 1 steps train the critic alone" in said
    assert Policy.updates == [] and len(Critic.updates) == 1


# ------------------------------------------------------------------ what planted bugs got past other tests

ADAPTIVE = [
    "algorithm.kl_ctrl.type=adaptive",
    "algorithm.kl_ctrl.horizon=100",
    "algorithm.kl_ctrl.target_kl=5",
]


def test_the_kl_controller_is_restored(tmp_path):
    first = instant_trainer(tmp_path / "run", "trainer.total_training_steps=1", *ADAPTIVE, algorithm="ppo")
    run(first)
    assert first.kl_controller.value != 0.001
    second = instant_trainer(tmp_path / "run", "trainer.total_training_steps=1", *ADAPTIVE, algorithm="ppo")
    run(second)
    assert second.kl_controller.value == first.kl_controller.value


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_run_says_what_it_is_and_each_of_its_metrics_is_in_the_glossary(tmp_path, capsys, algorithm):
    settings = ["trainer.total_training_steps=1", "trainer.critic_warmup=1"]
    run(instant_trainer(tmp_path / "run", *settings, algorithm=algorithm))
    lines = capsys.readouterr().out.splitlines()
    begun = [line.split(":")[0] for line in lines]
    for name in ("model", "data", "algorithm", "batch", "processes", "folder", "retriever"):
        assert begun.count(name) == 1, name
    warm_up = (
        "the first 1 steps train the critic alone (trainer.critic_warmup); the policy learns from then on"
    )
    assert (warm_up in lines) == (algorithm == "ppo")
    metrics = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    known = documented_metrics()
    assert [name for name in metrics if not re.fullmatch(known, name)] == ["step"]


def test_the_running_baseline_is_restored(tmp_path):
    settings = ["trainer.total_training_steps=1", "algorithm.adv_estimator=rae"]
    first = instant_trainer(tmp_path / "run", *settings)
    run(first)
    assert first.running_baseline.values
    second = instant_trainer(tmp_path / "run", *settings)
    run(second)
    assert second.running_baseline.values == first.running_baseline.values


def test_the_critic_learns_in_mini_batches_of_its_own(tmp_path):
    run(instant_trainer(tmp_path / "run", "critic.ppo_mini_batch_size=16", algorithm="ppo"))
    (actor,) = Policy.updates
    (critic,) = Critic.updates
    assert (actor.meta_info["num_mini_batches"], critic.meta_info["num_mini_batches"]) == (4, 2)


def test_rows_are_shuffled_anew_in_every_step(tmp_path):
    run(
        instant_trainer(
            tmp_path / "run", "trainer.total_training_steps=3", "actor_rollout_ref.actor.shuffle=true"
        )
    )
    orders = [
        [uid.split("-")[1] for uid in update.non_tensor_batch["uid"].tolist()] for update in Policy.updates
    ]
    assert len({tuple(order) for order in orders}) == 3


@pytest.mark.slow
def test_a_step_costs_the_driver_little(tmp_path):
    """Scores, advantages, metrics and records, beside workers that answer at once in the same process: at
    most 25 times the CPU time that decoding the step's tokens once takes on the same machine (11 were seen).
    """
    run(instant_trainer(tmp_path / "warm", algorithm="ppo"))
    trainer = instant_trainer(tmp_path / "run", algorithm="ppo", rows=512, tokens=1500)
    try:
        trainer.init_workers()
        started = time.process_time()
        trainer.fit()
        seconds = time.process_time() - started
        sequences = [row.tolist() for update in Policy.updates for row in update.tensors["input_ids"]]
        started = time.process_time()
        trainer.tokenizer.batch_decode(sequences)
        of_decoding = time.process_time() - started
    finally:
        trainer.shutdown()
    assert len(sequences) == 512
    assert seconds < 25 * of_decoding
