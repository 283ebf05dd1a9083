"""What training does when searches fail: few are left out and counted, many stop the run with one line."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from data_prep.microworld import write_world
from verl.checkpoints.run_state import RunStopped
from verl.config import load_config, replace_values
from verl.protocol import DataProto
from verl.trainer.config import validate
from verl.trainer.main_ppo import build_trainer
from verl.trainer.ppo.episodes import FailureWatch
from verl.trainer.ppo.scoring import score

BASE_MODEL = Path(__file__).resolve().parents[3] / "data_prep" / "base_model"
REASON = "no answer within 60 s (http://a:1/retrieve: refused the connection)"


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    write_world(7, folder, num_train=8, num_test=10, num_3hop=2)
    return folder


def make_trainer(world: Path, run_dir: Path, num_failing: int, *settings: str):
    """A trainer whose rollout gives two tokens for each row, but for the first rows, whose search failed."""
    config = load_config(
        [
            f"data.train_files={world / 'train.parquet'}",
            f"data.val_files={world / 'test.parquet'}",
            f"actor_rollout_ref.model.path={BASE_MODEL}",
            "algorithm.adv_estimator=grpo",
            "data.train_batch_size=4",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            "actor_rollout_ref.actor.ppo_micro_batch_size=4",
            f"trainer.default_local_dir={run_dir}",
            *settings,
        ]
    )
    validate(config)
    config = replace_values(config, {"trainer.backend": "local", "trainer.device": "cpu"})

    def generate_sequences(gen_batch: DataProto) -> DataProto:
        num_rows = len(gen_batch)
        mask = torch.ones(num_rows, 2, dtype=torch.long)
        mask[:num_failing] = 0
        ones = torch.ones(num_rows, 2, dtype=torch.long)
        records = [
            {
                "turns": [{"action": "search", "query": "q", "error": REASON if row < num_failing else None}],
                "num_actions": 1,
                "num_valid_actions": 1,
                "num_searches": 0,
                "finish_reason": "search_failed" if row < num_failing else "answer",
                "prompt_text": "",
                "policy_text": "",
                "version_first": 0,
                "version_last": 0,
            }
            for row in range(num_rows)
        ]
        tensors = {"prompts": ones, "responses": ones, "response_mask": mask, "rollout_log_probs": mask * 0.0}
        both = {name: torch.ones(num_rows, 4, dtype=torch.long) for name in ("input_ids", "attention_mask")}
        return DataProto.from_dict(
            tensors=tensors | both,
            non_tensors={"trajectory": records},
            meta_info={"metrics": {"retrieval/searches": 7.0}},
        )

    trainer = build_trainer(config)
    trainer.actor_rollout_wg = SimpleNamespace(generate_sequences=generate_sequences)
    return trainer


def collect(trainer):
    with trainer._finishing_run():
        step = trainer.state.step + 1
        num_groups = trainer.collector.begin()
        while num_groups > 0:
            trajectories = trainer._trajectories(num_groups, step)
            score(trajectories, trainer.reward_fn, trainer.config)
            trainer.collector.add(trajectories)
            num_groups = trainer.collector.num_missing()
        return trainer.collector.selected(step, seconds=1.0)


def test_rule_9_a_few_failed_searches_are_left_out_and_counted(world, tmp_path):
    batch, metrics = collect(make_trainer(world, tmp_path, 2))
    assert len(batch) == 2 and (batch.tensors["response_mask"] == 1).all()
    assert {t["finish_reason"] for t in batch.non_tensor_batch["trajectory"]} == {"answer"}
    assert (
        metrics["env/search_failed"] == metrics["env/left_out"] == 2.0
        and metrics["retrieval/searches"] == 7.0
    )


@pytest.mark.parametrize(
    "num_failing, settings",
    [(3, []), (4, []), (1, ["retriever.max_failed_share=0"]), (4, ["retriever.max_failed_share=1"])],
)
def test_many_failed_searches_stop_the_run_with_one_line(world, tmp_path, num_failing, settings):
    trainer = make_trainer(world, tmp_path, num_failing, *settings)
    with pytest.raises(RunStopped) as stopped:
        collect(trainer)
    said = str(stopped.value)
    assert f"{num_failing} of 4 trajectories" in said and REASON in said and "\n" not in said
    assert "run the same command again: the run goes on from its beginning" in said


def test_a_validation_without_a_retriever_is_no_result(world, tmp_path):
    with pytest.raises(RunStopped, match="10 of 10 trajectories"):
        make_trainer(world, tmp_path, 10)._validate(complete=False)
    report = make_trainer(world, tmp_path, 2)._validate(complete=False)
    assert report.metrics()["val/greedy/search_failed"] == 2.0


def test_an_environment_is_named_at_its_first_failure_and_whenever_all_its_episodes_fail():
    said: list[str] = []
    watch = FailureWatch(load_config([]), said.append)

    def records(env_class: str, count: int, num_failed: int):
        return [
            {"env_class": env_class, "finish_reason": reason, "env_error": "gone", "turns": []}
            for reason in ["env_failed"] * num_failed + ["done"] * (count - num_failed)
        ]

    for num_failed in (0, 1, 2, 4, 3, 4):
        watch.check(records("maze:Maze", 4, num_failed) + records("gsm8k", 8, 0))
    head = "environment maze:Maze: an episode failed and is left out"
    assert said == [f"{head} ({number} of 4): gone" for number in (1, 4, 4)]
