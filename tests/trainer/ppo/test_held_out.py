"""The sets of trainer.evals: when they are asked, and what comes of them."""

import json

import pytest
import torch
from instant_runs import instant_trainer
from instant_runs import run as run_at_once
from small_runs import BASE_MODEL, arguments, metrics
from test_validation import Generation, Questions

from verl.config import load_config
from verl.config.mixture import HeldOut
from verl.data.controls import with_retriever
from verl.data.rl_dataset import RLHFDataset
from verl.data.row_environments import check_environments
from verl.evaluation.program import main as evaluate
from verl.trainer.main_ppo import run
from verl.trainer.ppo.held_out import HeldOutSets, read_sets
from verl.utils import hf_tokenizer

CONTROLS = ("shuffled", "empty")
TOKENIZER = hf_tokenizer(str(BASE_MODEL), correct_pad_token=False)


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


def sets_of(world, *settings):
    """Return the sets of a configuration with the world's test rows as validation, and these rows."""
    config = load_config(
        [f"data.val_files={world / 'test.parquet'}", "data.max_prompt_length=512", *settings]
    )
    data = {**config.data, "env_class": config.environment.env_class}
    validation = RLHFDataset(config.data.val_files, TOKENIZER, data, config.data.val_data_num)
    return read_sets(config, TOKENIZER, data, validation), validation


def asked(dataset):
    return [dataset[i]["raw_prompt_ids"] for i in range(len(dataset))]


def test_a_set_without_files_asks_the_validation_s_questions_and_its_name_says_the_retriever(world):
    controls = "trainer.evals=[{retriever: shuffled, n: 6}, {retriever: empty, n: 100}, {n: 6}]"
    sets, validation = sets_of(world, controls)
    assert [held_out.name for held_out, _ in sets] == ["val/shuffled", "val/empty", "val"]
    shuffled, empty, own = (rows for _, rows in sets)
    assert len(shuffled) == 6 and asked(shuffled) == asked(own) and asked(empty) == asked(validation)
    assert [own[i]["episode"] for i in range(6)] == [None] * 6
    assert {empty[i]["episode"]["extras"]["retriever"]["kind"] for i in range(20)} == {"empty"}
    questions = {row["question"] for row in shuffled.rows}
    for i in range(6):
        control = shuffled[i]["episode"]["extras"]["retriever"]
        assert control["question"] == shuffled.rows[i]["question"]
        assert control["gold_titles"] == list(shuffled.rows[i]["extra_info"]["gold_titles"])
        assert set(control["others"]) == questions - {control["question"]}
    few, _ = sets_of(world, controls, "data.val_data_num=3")
    assert [len(rows) for _, rows in few] == [3, 3, 3]


@pytest.mark.parametrize(
    "setting", ["do_search=false", "environment.env_class=single_turn", "data.val_data_num=1"]
)
def test_a_control_that_the_validation_has_no_rows_for_is_left_out_and_said(world, setting, capsys):
    sets, _ = sets_of(world, "trainer.evals=[{retriever: shuffled}, {n: 6}]", setting)
    assert [held_out.name for held_out, _ in sets] == ["val"]
    assert "note: trainer.evals: val/shuffled is left out" in capsys.readouterr().out


def test_rows_that_do_not_search_are_refused_from_their_files_alone(tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"prompt": "Write a word.", "env_class": "single_turn"}) + "\n")
    config = load_config([f"trainer.evals=[{{files: {other}, retriever: empty}}]"])
    with pytest.raises(ValueError, match="retriever: empty for the rows of .*other.jsonl"):
        check_environments(config)
    config = load_config(
        ["trainer.evals=[{files: not_made_yet.parquet, retriever: empty}, {retriever: empty}]"]
    )
    check_environments(config)


def test_the_retriever_of_a_set_changes_what_its_searches_find_and_nothing_else():
    generate = Generation()
    letters = "abcdfgh"  # equally many tokens
    rest = {"data_source": "x", "reward_model": {"ground_truth": "y"}}
    rows = [{"prompt": f"Question: {letter}", **rest} for letter in letters]
    plain = RLHFDataset(rows, TOKENIZER)
    sets = []
    for retriever in ("own", "shuffled", "empty"):
        held_out = HeldOut(name=f"x/{retriever}", every=5, rollouts=4, retriever=retriever)
        sets.append((held_out, with_retriever(plain, retriever, 3, 2)))
    figures, lines = HeldOutSets(sets, score, None, seed=3).measure(generate, step=5, last=False)
    assert {name.rsplit("/", 1)[0] for name in figures} == {"eval/x/own", "eval/x/shuffled", "eval/x/empty"}
    assert {line["eval"] for line in lines} == {"x/own", "x/shuffled", "x/empty"}
    own, shuffled, empty = generate.asked
    for batch in (shuffled, empty):
        assert torch.equal(batch.tensors["sampling_seeds"], own.tensors["sampling_seeds"])
        assert batch.meta_info == own.meta_info
        assert (
            batch.non_tensor_batch["raw_prompt_ids"].tolist()
            == own.non_tensor_batch["raw_prompt_ids"].tolist()
        )
    episodes = [batch.non_tensor_batch["episode"].tolist() for batch in generate.asked]
    assert episodes[0] == [None] * 28
    assert [episode["extras"]["retriever"] for episode in episodes[2]] == [{"kind": "empty"}] * 28
    others = [episode["extras"]["retriever"]["others"] for episode in episodes[1]]
    assert len({first for first, _ in others}) == 7 and all(first != second for first, second in others)


def test_a_run_that_only_validates_measures_its_sets_as_well(tmp_path, capsys):
    trainer = instant_trainer(tmp_path / "run", "trainer.val_only=true")
    held_out = HeldOut(name="val/empty", every=40, rollouts=2, retriever="empty")
    trainer.evals = HeldOutSets([(held_out, trainer.val_dataset)], trainer.val_reward_fn, None, seed=0)
    run_at_once(trainer)
    lines = [json.loads(text) for text in (tmp_path / "run" / "evaluations.jsonl").open()]
    assert [(line["eval"], line["step"], line["example_id"]) for line in lines] == [
        ("val/empty", 0, 0),
        ("val/empty", 0, 0),
        ("val/empty", 0, 1),
        ("val/empty", 0, 1),
    ]
    assert "eval/val/empty/em at step 0" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_measures_its_sets_and_the_program_measures_its_checkpoint_alike(
    world, url, tmp_path, capsys, monkeypatch
):
    file = world / "test.parquet"
    controls = ", ".join(f"{{files: {file}, retriever: {kind}, rollouts: 3, n: 6}}" for kind in CONTROLS)
    sets = f"{{files: {file}, name: held, every: 2, rollouts: 3, n: 6}}, {{files: [{file}], every: 9}}"
    sets = f"[{sets}, {controls}]"
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
    flags += ["--rollouts", "3", "--out", str(tmp_path / "evals")]
    capsys.readouterr()
    monkeypatch.setenv("RETRIEVER_URL", url)  # the run is over
    assert evaluate([*flags, "--retriever", "own,shuffled,empty"]) == 0
    table = capsys.readouterr().out.splitlines()
    heads = next(number for number, text in enumerate(table) if text.split() == ["own", "shuffled", "empty"])
    assert table[heads + 1].startswith("avg@3") and table[heads + 1].count("[") == 3
    folder = tmp_path / "evals" / "run" / "global_step_3" / "test"
    measured = [json.loads(each) for each in (folder / "results.jsonl").read_text().splitlines()]

    def known(rows):
        names = ("question", "answer", "reward", "searches", "finish_reason")
        return {(x["example_id"], x["rollout_idx"]): [x[name] for name in names] for x in rows}

    assert known(measured) == known(last)
    for kind in CONTROLS:
        trained = [each for each in lines if each["eval"] == f"test/{kind}"]
        text = (folder / kind / "results.jsonl").read_text()
        control = [json.loads(each) for each in text.splitlines()]
        assert len(trained) == 18 and known(control) == known(trained)
        found = [turn["documents"] for each in control for turn in each["trajectory"]["turns"]]
        assert any(found) == (kind == "shuffled")
        assert json.loads((folder / kind / "settings.json").read_text())["retriever"] == kind
    assert "retriever" not in json.loads((folder / "settings.json").read_text())
    assert [row.get("eval/test/empty/searches") is not None for row in rows] == [False, False, False, True]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["avg@3"][0] == pytest.approx(rows[-1]["eval/held/avg@3"])


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ("[3]", "expected {files"),
        ("[{files: FILE, retriever: none}]", "expected one of: own, shuffled, empty"),
        ("[{files: FILE, retriever: empty}, {files: FILE, retriever: empty}]", "'test/empty'"),
        ("[{files: FILE, retriever: empty, name: a/b}]", "has a /"),
        (
            "[{files: OTHER, retriever: shuffled}]",
            "retriever: shuffled for the rows of OTHER (trainer.evals), of",
        ),
        ("[{files: [FILE, OTHER], retriever: empty}]", "environment single_turn; expected rows that search"),
        ("[{files: FILE, retriever: empty}] do_search=false", "where nothing is searched"),
        ("[{files: nowhere.parquet}]", "nowhere.parquet"),
        ("[{file: nowhere.parquet}]", "nearest one is 'files'"),
        ("[{files: FILE, rollouts: 0}]", "rollouts"),
        ("[{files: FILE}, {files: FILE}]", "taken"),
    ],
)
def test_mistakes_are_said_before_anything_starts(world, url, tmp_path, capsys, sets, message):
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"prompt": "Write a word.", "env_class": "single_turn"}) + "\n")
    sets, *more = sets.replace("FILE", str(world / "test.parquet")).replace("OTHER", str(other)).split("] ")
    sets = sets if sets.endswith("]") else f"{sets}]"
    assert run([*arguments(world, url, tmp_path, trainer__evals=sets), *more]) == 2
    assert message.replace("OTHER", str(other)) in capsys.readouterr().err
