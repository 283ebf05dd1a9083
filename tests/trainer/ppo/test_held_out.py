"""The sets of trainer.evals: when they are asked, and what comes of them."""

import json

import pytest
import torch
from small_runs import arguments, metrics
from test_validation import Generation, Questions

from verl.config.mixture import HeldOut
from verl.trainer.main_evaluate import main as evaluate
from verl.trainer.main_ppo import run
from verl.trainer.ppo.held_out import HeldOutSets


def score(batch, return_dict):
    """Question 0 is right, and question 1 in every second rollout; nobody knows of question 2."""
    indices = batch.non_tensor_batch["index"].tolist()
    right = [None if i == 2 else float(i == 0 or (i == 1 and n % 2)) for n, i in enumerate(indices)]
    known = [value or 0.0 for value in right]
    reward_tensor = torch.tensor([[0.0, value] for value in known])
    return {"reward_tensor": reward_tensor, "em": known, "f1": known, "score": right}


@pytest.mark.parametrize("batch_size", [None, 4])
def test_each_row_is_asked_as_often_as_it_says_and_the_figures_are_over_rows(batch_size):
    generate = Generation()
    held_out = HeldOut(files="x.parquet", name="x", every=5, rollouts=4, temperature=0.7)
    sets = HeldOutSets([(held_out, Questions())], score, batch_size, seed=3)
    assert sets.most_rollouts == 28
    assert sets.measure(generate, step=4, last=False) == ({}, []) and not generate.asked
    figures, lines = sets.measure(generate, step=5, last=False)
    assert {batch.meta_info["temperature"] for batch in generate.asked} == {0.7}
    assert [(line["example_id"], line["rollout_idx"]) for line in lines] == [
        (example, i) for example in range(7) for i in range(4)
    ]
    assert figures["eval/x/avg@4"] == pytest.approx((1 + 0.5) / 6) and figures["eval/x/unverified"] == 4
    assert figures["eval/x/pass@1"] == pytest.approx((1 + 0.5) / 6)
    assert figures["eval/x/pass@2"] == pytest.approx((1 + 5 / 6) / 6)
    assert figures["eval/x/pass@4"] == pytest.approx(2 / 6)
    seeds = torch.cat([batch.tensors["sampling_seeds"] for batch in generate.asked]).tolist()
    assert len(set(seeds)) == 28
    again = Generation()
    sets.measure(again, step=6, last=True)  # the last step always, with the same draws
    assert torch.cat([batch.tensors["sampling_seeds"] for batch in again.asked]).tolist() == seeds


@pytest.mark.slow
def test_a_run_measures_its_sets_and_the_program_measures_its_checkpoint_alike(world, url, tmp_path):
    file = world / "test.parquet"
    sets = f"[{{files: {file}, name: held, every: 2, rollouts: 3, n: 6}}, {{files: [{file}], every: 9}}]"
    line = arguments(world, url, tmp_path / "run", trainer__total_training_steps=3, trainer__evals=sets)
    assert run(line) == 0
    rows = metrics(tmp_path / "run")
    assert ["eval/held/avg@3" in row for row in rows] == [False, False, True, True]
    assert ["eval/test/avg@1" in row for row in rows] == [False, False, False, True]
    text = (tmp_path / "run" / "evaluations.jsonl").read_text()
    lines = [json.loads(each) for each in text.splitlines()]
    last = [each for each in lines if each["step"] == 3 and each["eval"] == "held"]
    assert len(last) == 18
    flags = ["--model", str(tmp_path / "run"), "--steps", "3", "--benchmarks", str(file), "-n", "6"]
    assert evaluate([*flags, "--rollouts", "3", "--out", str(tmp_path / "evals")]) == 0
    folder = tmp_path / "evals" / "run" / "global_step_3" / "test"
    measured = [json.loads(each) for each in (folder / "results.jsonl").read_text().splitlines()]

    def known(rows):
        names = ("question", "answer", "reward", "searches", "finish_reason")
        return {(x["example_id"], x["rollout_idx"]): [x[name] for name in names] for x in rows}

    assert known(measured) == known(last)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["avg@3"][0] == pytest.approx(rows[-1]["eval/held/avg@3"])


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ("[3]", "expected {files"),
        ("[{every: 3}]", "Found no files"),
        ("[{files: nowhere.parquet}]", "nowhere.parquet"),
        ("[{file: nowhere.parquet}]", "nearest one is 'files'"),
        ("[{files: FILE, rollouts: 0}]", "rollouts"),
        ("[{files: FILE}, {files: FILE}]", "taken"),
    ],
)
def test_mistakes_are_said_before_anything_starts(world, url, tmp_path, capsys, sets, message):
    sets = sets.replace("FILE", str(world / "test.parquet"))
    assert run(arguments(world, url, tmp_path, trainer__evals=sets)) == 2
    assert message in capsys.readouterr().err
