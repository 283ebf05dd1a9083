"""Several sources in one data set: what may be written, what is drawn, and a restart that changes nothing."""

from __future__ import annotations

import json

import numpy as np
import pytest
from test_rl_dataset import ByteTokenizer

from verl.config import load_config, replace_values
from verl.config.mixture import sources_of
from verl.data.mixture import prompt_sampler, training_rows, with_verifier
from verl.data.rl_dataset import DataFailed

POOLS = "prompt_selection.difficulty_pools.enable=true"


def write(path, count: int, **columns) -> str:
    row = {"data_source": path.stem, "reward_model": {"ground_truth": "7"}} | columns
    lines = [
        json.dumps(row | {"prompt": f"{path.stem} {i}?", "extra_info": {"index": i}}) for i in range(count)
    ]
    path.write_text("\n".join(lines))
    return str(path)


def mixture_of(*entries: dict, settings=()):
    config = load_config(["data.train_batch_size=8", "data.max_start_length=100", *settings])
    config = replace_values(config, {"data.mixture": list(entries)})
    rows = training_rows(config, ByteTokenizer())
    return rows, prompt_sampler(rows, config)


@pytest.fixture
def files(tmp_path):
    return [{"path": write(tmp_path / f"{name}.jsonl", n)} for name, n in (("a", 90), ("b", 30), ("c", 500))]


def shares(rows, sampler, draws: int, count: int = 8) -> np.ndarray:
    drawn = [rows.source_of(row) for _ in range(draws) for row in sampler.take(count)]
    return np.bincount(drawn, minlength=len(rows.sources)) / len(drawn)


@pytest.mark.parametrize("count", [1, 8, 13])
def test_each_source_gets_its_ratio_within_a_percent(files, count):
    ratios = (3, 1, 0.7)
    rows, sampler = mixture_of(*(file | {"ratio": r} for file, r in zip(files, ratios, strict=True)))
    wanted = np.array(ratios) / sum(ratios)
    sampler.batch_size = count
    assert np.abs(shares(rows, sampler, 1000, count) - wanted).max() < 0.001  # 10 times better than asked for


def test_without_ratios_a_source_is_drawn_by_its_size_and_amount(files):
    (a, b, c) = files
    rows, sampler = mixture_of(a | {"amount": 3.0}, b, c | {"amount": 100})
    assert len(rows) == 90 + 30 + 100
    assert np.abs(shares(rows, sampler, 500) - np.array([270, 30, 100]) / 400).max() < 0.001
    assert {rows[i]["source"] for i in range(len(rows))} == {"a", "b", "c"}
    half, _ = mixture_of(a | {"amount": 0.5})
    assert len(half) == 45 and len({bytes(half[i]["raw_prompt_ids"]) for i in range(45)}) == 45


def test_one_row_of_many_is_refused_with_both_spellings(files):
    with pytest.raises(ValueError, match=r"amount: 1, .* 500 rows; expected amount: 1.0 .* amount: 500"):
        mixture_of(files[2] | {"amount": 1})
    assert len(mixture_of(files[0] | {"amount": 1}, files[1])[0]) == 31  # of few rows it may be meant


@pytest.mark.parametrize(
    "entry, message",
    [
        ({"paht": "x"}, "unknown key 'paht' .* nearest one is 'path'"),
        ({"path": "nowhere.parquet"}, "no file .parquet or .jsonl at nowhere.parquet"),
        ({"ratio": 1}, "expected path: <file>, or env"),
        ({"env": {"name": "x"}}, "expected {id: <name>"),
        ({"path": "x.jsonl", "ratio": 0}, r"data.mixture\[0\].ratio=0; expected a number above 0"),
        ({"path": "x.jsonl", "n": "4"}, r"data.mixture\[0\].n=4; expected a whole number"),
        ("x.jsonl", "expected {path"),
        ({"path": []}, r"Found data.mixture\[0\].path=\[\]; expected a text, or a list of texts"),
        ({"path": [3]}, r"Found data.mixture\[0\].path=\[3\]; expected a text"),
        ({"env": {"id": "a/b"}}, "the name 'a/b' at .* with a /"),
    ],
)
def test_mistakes_are_refused(entry, message):
    config = replace_values(load_config([]), {"data.mixture": [entry]})
    with pytest.raises(ValueError, match=message):
        sources_of(config)


def test_a_small_source_may_be_smaller_than_a_step_also_where_it_streams(files):
    """Its rows come evenly: none twice more often than another."""
    for more in ("data.streaming=true", "data.streaming=false", POOLS):
        sources = (files[0] | {"ratio": 1}, files[1] | {"ratio": 20, "amount": 5})
        rows, sampler = mixture_of(*sources, settings=[more, "prompt_selection.retire_solved=0.9"])
        first = [rows[i]["raw_prompt_ids"] for i in sampler.take(8)]
        assert 5 <= len(set(map(bytes, first))) <= 6
        drawn = [row for _ in range(60) for row in sampler.take(8)]
        counts = np.unique([row for row in drawn if rows.source_of(row) == 1], return_counts=True)[1]
        assert len(counts) == 5 and counts.max() - counts.min() <= 1
        sampler.close()


def test_a_folder_gives_the_files_of_its_splits(tmp_path):
    (tmp_path / "data").mkdir()
    for name in ("train-0", "train-1", "test-0"):
        write(tmp_path / "data" / f"{name}.jsonl", 3)
    train = {"path": str(tmp_path)}
    test = {"path": str(tmp_path), "splits": "test", "name": "t"}
    config = replace_values(load_config([]), {"data.mixture": [train, test]})
    names = [[file.name for file in each.files] for each in sources_of(config)]
    assert names == [["train-0.jsonl", "train-1.jsonl"], ["test-0.jsonl"]]
    config = replace_values(config, {"data.mixture": [train] * 2})
    with pytest.raises(ValueError, match="the name '.*' at .* twice"):
        sources_of(config)


def test_a_source_names_verifier_and_environment_of_rows_that_name_none(tmp_path):
    path = tmp_path / "s.jsonl"
    own = {"env_class": "gsm8k", "reward_model": {"ground_truth": {"verifiers": [{"name": "puzzle"}]}}}
    lines = [{"prompt": "q", "reward_spec": {"ground_truth": "7"}}, {"prompt": "q", **own}]
    path.write_text("\n".join(map(json.dumps, lines)))
    rows, _ = mixture_of(
        {"path": str(path), "verifier": "math", "env_class": "text2sql", "name": "n"},
        settings=["data.train_batch_size=1"],
    )
    dataset = rows.datasets[0]
    first, second = [dataset.read_row(row).columns for _, row in dataset.rows_to_check()]
    assert first["reward_model"]["ground_truth"]["verifiers"] == [
        {"name": "math", "label": "7", "weight": 1.0}
    ]
    assert first["env_class"] == "text2sql" and first["data_source"] == "n"
    assert second["env_class"] == "gsm8k"
    assert rows[1]["reward_model"]["ground_truth"]["verifiers"] == [{"name": "puzzle"}]


@pytest.mark.parametrize(
    "truth, label",
    [("a", "a"), (7, "7"), ({"target": ["x"]}, "x"), ({"target": np.array(["x", "y"])}, '["x", "y"]')],
)
def test_labels_are_text(truth, label):
    made = with_verifier({"style": "rule", "ground_truth": truth}, "math")
    assert made["ground_truth"]["verifiers"][0]["label"] == label and made["style"] == "rule"


@pytest.mark.parametrize("pools", ["false", "true"])
def test_rule_10_a_restart_draws_the_same(files, pools):
    settings = [f"prompt_selection.difficulty_pools.enable={pools}", "prompt_selection.retire_solved=0.9"]
    entries = (files[0] | {"ratio": 2}, files[1], files[2] | {"amount": 0.3})
    rows, sampler = mixture_of(*entries, settings=settings)
    rng = np.random.default_rng(0)
    for _ in range(9):
        drawn = sampler.take(8)
        sampler.record(drawn, rng.random(8).tolist())
    _, resumed = mixture_of(*entries, settings=settings)
    resumed.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    resumed.load_history(sampler.history())
    assert sampler.num_left == resumed.num_left < len(rows)
    assert [sampler.take(5, [3]) for _ in range(40)] == [resumed.take(5, [3]) for _ in range(40)]
    with pytest.raises(ValueError, match="Found the sources a .* made with a, b, c"):
        mixture_of(files[0])[1].load_state_dict(sampler.state_dict())


def test_a_solved_source_gives_its_share_to_the_others(files):
    rows, sampler = mixture_of(files[0], files[1], settings=["prompt_selection.retire_solved=0.9"])
    sampler.take(8)
    sampler.record(range(90, 120), [0.95] * 30)
    assert shares(rows, sampler, 50).tolist() == [1, 0]
    assert sampler.metrics() == {"filter/retired": 30.0}
    sampler.record(range(85), [1.0] * 85)
    assert set(sampler.take(5)) == set(range(85, 90))
    with pytest.raises(DataFailed, match="5 prompts are left .*retire_solved has not .* asks 6"):
        sampler.take(6)


@pytest.mark.parametrize("pools", ["false", "true"])
def test_a_prompt_that_still_teaches_is_not_retired_in_any_source(files, pools):
    settings = [f"prompt_selection.difficulty_pools.enable={pools}", "prompt_selection.retire_solved=0.9"]
    _, sampler = mixture_of(files[0], files[1], settings=settings)
    sampler.record([0, 1, 90, 91], [1.0] * 4, {1, 91})
    assert [each.retired for each in sampler.samplers.values()] == [{0}, {0}]
    sampler.record([91], [1.0])
    assert [each.retired for each in sampler.samplers.values()] == [{0}, {0, 1}]


def test_a_source_is_solved_in_groups_of_which_every_answer_is(files):
    rows, _ = mixture_of(files[0], files[1])
    scores = {"u": [5.0, 0.0], "v": [0.8, 0.8], "w": [1.0, 1.0]}
    metrics = rows.metrics({"u": "a", "v": "a", "w": "b", "lost": "b"}, scores, {"u"})
    assert metrics == {
        "data/a/share": 0.5, "data/a/score": pytest.approx(1.65), "data/a/solved": 0.5,
        "data/b/share": 0.5, "data/b/score": 1.0, "data/b/solved": 1.0,
    }  # fmt: skip


@pytest.mark.slow
def test_a_source_may_be_a_verifiers_environment(tmp_path, monkeypatch, files):
    verifiers = pytest.importorskip("verifiers")
    if not hasattr(verifiers, "load_environment"):
        pytest.skip("verifiers below 0.4 only")
    (tmp_path / "doubles_for_mixture.py").write_text(
        "import verifiers as vf\nfrom datasets import Dataset\n"
        "def load_environment(count=3):\n"
        "    rows = [{'question': f'{i}+{i}?', 'answer': str(2 * i)} for i in range(count)]\n"
        "    rubric = vf.Rubric(funcs=[lambda completion, answer: float(answer in str(completion))])\n"
        "    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=rubric)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    env = {"id": "doubles-for-mixture", "args": {"count": 20}}
    rows, sampler = mixture_of({"env": env, "ratio": 1}, files[0] | {"ratio": 1})
    drawn = [rows[i] for i in sampler.take(8)]
    own = [row for row in drawn if row["source"] == "doubles-for-mixture"]
    assert len(rows) == 110 and len(own) == 4 and b"?" in bytes(own[0]["raw_prompt_ids"])
    dataset = rows.datasets[0]
    first = dataset.read_row(dataset.rows[0]).columns
    assert first["env_class"] == "verifiers" and json.loads(first["verifiers"])["row"]["answer"] == "0"


@pytest.mark.parametrize("settings", [[], [POOLS], ["data.streaming=true"]])
def test_no_sampler_asks_a_prompt_twice_in_a_step(files, settings):
    rows, sampler = mixture_of(files[0] | {"ratio": 1}, files[1] | {"ratio": 1}, settings=settings)
    for step in range(60):
        asked = sampler.take(8)
        for count in (5, step % 4 + 1):
            asked += sampler.take(count, asked)
        assert len(set(asked)) == len(asked)
    sampler.close()


def test_an_exhausted_source_s_draws_do_not_count_in_the_shares_of_the_others(files):
    entries = (file | {"ratio": ratio} for file, ratio in zip(files, (3, 4, 1), strict=True))
    rows, sampler = mixture_of(*entries, settings=["prompt_selection.retire_solved=0.9"])
    for _ in range(20):
        sampler.take(8)
    sampler.record(range(90, 120), [1.0] * 30)  # the second source is solved
    for _ in range(30):
        sampler.take(8)
        (a, _, c) = sampler.drawn
        assert abs(a - 0.75 * (a + c)) <= 1


def test_what_a_prompt_scored_is_told_to_its_source_by_its_place_there(files):
    rows, sampler = mixture_of(*files, settings=["prompt_selection.retire_solved=0.9"])
    sampler.record([5, 90 + 7, 120 + 11], [1.0, 1.0, 1.0])
    assert [own.retired for own in sampler.samplers.values()] == [{5}, {7}, {11}]


def test_shares_of_pools_are_means_over_sources_and_counts_are_sums(files):
    settings = [POOLS, "prompt_selection.retire_solved=0.9"]
    _, sampler = mixture_of(files[0], files[1], settings=settings)
    sampler.record(range(90), [1.0] * 90)
    metrics = sampler.metrics()
    assert metrics["pools/measured"] == metrics["pools/easy"] == 0.5
    assert metrics["filter/retired"] == 90
