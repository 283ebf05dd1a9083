"""The whole program on a small world: what it writes, what it refuses, and that backends agree."""

import json
import re
import shutil
import subprocess
import sys

import pytest
from instant_runs import documented_metrics
from small_runs import BASE_MODEL, ROOT, arguments, metrics
from transformers import AutoTokenizer

from verl.trainer.main_ppo import run


@pytest.mark.slow
@pytest.mark.usefixtures("with_picture")
def test_a_run_leaves_its_records_and_a_second_start_goes_on(world, url, tmp_path):
    line = arguments(
        world,
        url,
        tmp_path,
        data__extra_val_files=world / "test_3hop.parquet",
        trainer__val_modes="[sampled,greedy]",
    )
    assert run(line) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["num_val_questions"] == 20 and summary["extra_num_val_questions"] == 4
    assert summary["steps"] == 2 and set(summary["em_after_by_hops"]) == {"1", "2"}
    assert [row["step"] for row in metrics(tmp_path)] == [0, 1, 2]
    for name in ("curves.png", "trajectories.html", "global_step_2/actor/huggingface/model.safetensors"):
        assert (tmp_path / name).stat().st_size > 0

    before = metrics(tmp_path)
    assert run([*line, "trainer.total_training_steps=3"]) == 0
    after = metrics(tmp_path)
    assert [row["step"] for row in after] == [0, 1, 2, 3] and after[:3] == before

    def ask_only(*settings: str) -> int:
        return run([*line, "trainer.total_training_steps=3", "trainer.val_only=true", *settings])

    assert (
        run([*line, "trainer.total_training_steps=4", "data.train_batch_size=8"]) == 3
    )  # another data order
    assert metrics(tmp_path) == after

    (tmp_path / "summary.json").unlink()
    assert ask_only() == 0  # measures the newest checkpoint, and trains nothing
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["steps"] == 3 and summary["em_after"] == after[-1]["val/sampled/em"]
    assert metrics(tmp_path) == after
    earlier = f"trainer.resume_from_path={tmp_path / 'global_step_2'}"
    assert ask_only("trainer.resume_mode=from_path", earlier) == 2  # would cut the records of step 3
    assert metrics(tmp_path) == after


@pytest.mark.slow
@pytest.mark.ray
def test_rule_5_one_local_process_and_two_of_ray_take_the_same_step(world, url, tmp_path):
    rows = {}
    for name, processes in (("local", 1), ("ray", 2)):
        line = arguments(
            world,
            url,
            tmp_path / name,
            trainer__backend=name,
            trainer__n_gpus_per_node=processes,
            trainer__total_training_steps=1,
            trainer__val_before_train="false",
            trainer__save_freq=-1,
            trainer__test_freq=-1,
            algorithm__adv_estimator="gae",
            actor_rollout_ref__actor__ppo_mini_batch_size=8,
            actor_rollout_ref__actor__shuffle="true",
            actor_rollout_ref__actor__use_kl_loss="true",
            critic__ppo_mini_batch_size=4,
        )
        assert run(line) == 0
        (rows[name],) = metrics(tmp_path / name)
    for key in ("actor/pg_loss", "actor/grad_norm", "actor/kl_loss", "critic/vf_loss", "critic/grad_norm"):
        assert rows["ray"][key] == pytest.approx(rows["local"][key], rel=1e-5, abs=1e-7), key
    names = rows["local"].keys() | rows["ray"].keys()
    known = documented_metrics()
    assert [name for name in names if not re.fullmatch(known, name)] == ["step"], "docs/metrics.md lacks them"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_rule_10_killed_at_any_moment_a_run_ends_with_the_same_numbers():
    """With rollouts ahead, and kills of single actors: test_orchestrator.py."""
    command = [sys.executable, "scripts/check_resume.py", "--steps", "4"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 differ" in done.stdout and "the kills left: global_step_" in done.stdout


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"actor_rollout_ref__model__path": "/no/such/model"}, "/no/such/model"),
        pytest.param(
            {"retriever__url": "http://127.0.0.1:9/retrieve"},
            "retriever.url=http://127.0.0.1:9/retrieve does not answer",
            marks=pytest.mark.slow,  # it is asked for ten seconds
        ),
        ({"trainer__resume_mode": "latest"}, "trainer.resume_mode=latest"),
        ({"trainer__sede": 1}, "trainer.seed"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_started(world, url, tmp_path, capsys, settings, message):
    settings = settings | {"trainer__doctor_skip": "[home]"}  # the machine's own state is not asked
    assert run(arguments(world, url, tmp_path / "run", **settings)) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_with_more_words_than_the_embedding_has_rows_is_refused(world, url, tmp_path, capsys):
    model = shutil.copytree(BASE_MODEL, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(["<tool>"])
    tokenizer.save_pretrained(model)
    settings = {"actor_rollout_ref__model__path": model, "trainer__doctor_skip": "[home]"}
    assert run(arguments(world, url, tmp_path / "run", **settings)) == 2
    error = capsys.readouterr().err
    assert "the first: '<tool>' with the id 2560" in error and len(error.strip().splitlines()) == 1


@pytest.mark.slow
def test_a_server_that_is_not_there_ends_the_run_before_its_first_step(world, url, tmp_path, capsys):
    line = arguments(
        world,
        url,
        tmp_path / "run",
        actor_rollout_ref__rollout__name="remote",
        actor_rollout_ref__rollout__remote__urls="http://127.0.0.1:9",
    )
    expected = "server http://127.0.0.1:9 can't be used"
    assert run(line) == 3
    error = capsys.readouterr().err
    assert "error: " in error and expected in error and "Traceback" not in error
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_a_sweep_over_seeds_trains_one_model_for_each_in_a_folder_of_its_own(world, url, tmp_path):
    line = arguments(
        world,
        url,
        tmp_path,
        trainer__total_training_steps=1,
        trainer__val_before_train="false",
        trainer__save_freq=-1,
    )
    command = [sys.executable, "-m", "verl.trainer.main_ppo", "--multirun", *line, "trainer.seed=1,2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    folders = [tmp_path / f"trainer.seed={seed}" for seed in (1, 2)]
    assert [json.loads((folder / "summary.json").read_text())["seed"] for folder in folders] == [1, 2]
    assert [row["step"] for row in metrics(folders[1])] == [1]
    assert not (tmp_path / "metrics.jsonl").exists()
