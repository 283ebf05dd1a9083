"""Rows from parquet files, and an order of batches that survives a restart."""

import json

import numpy as np
import pandas as pd
import pytest

from verl.data.rl_dataset import PromptSampler, RLHFDataset

CONFIG = {
    "prompt_key": "prompt",
    "truncation": "error",
    "max_prompt_length": 40,
    "max_start_length": 20,
}


class ByteTokenizer:
    """One token per byte; an optional chat template that marks whose turn it is."""

    bos_token_id = None

    def __init__(self, chat_template: str | None = None) -> None:
        self.chat_template = chat_template

    def encode(self, text: str, add_special_tokens: bool, verbose: bool) -> list[int]:
        assert not add_special_tokens and not verbose  # verbose: a warning of long texts
        return list(text.encode())

    def apply_chat_template(self, messages, add_generation_prompt: bool, tokenize: bool) -> str:
        assert add_generation_prompt and not tokenize
        return "".join(f"[{m['role']}]{m['content']}" for m in messages) + "[me]"


def write(path, questions, **columns):
    frame = pd.DataFrame(
        {
            "data_source": ["nq"] * len(questions),
            "prompt": [[{"role": "user", "content": q}] for q in questions],
            "reward_model": [{"style": "rule", "ground_truth": {"target": [q.upper()]}} for q in questions],
            "extra_info": [{"index": i, "split": "train"} for i in range(len(questions))],
            "golden_answers": [[q] for q in questions],
            **columns,
        }
    )
    frame.to_parquet(path)
    return str(path)


def test_a_row_has_what_generation_and_reward_need(tmp_path):
    dataset = RLHFDataset(write(tmp_path / "a.parquet", ["who?", "where?"]), ByteTokenizer(), CONFIG)
    row = dataset[1]
    assert len(dataset) == 2
    assert bytes(row["raw_prompt_ids"]) == b"where?"
    assert row["data_source"] == "nq" and row["extra_info"]["index"] == 1
    assert list(row["reward_model"]["ground_truth"]["target"]) == ["WHERE?"]


def test_the_chat_template_is_used_if_there_is_one(tmp_path):
    file = write(tmp_path / "a.parquet", ["who?"])
    row = RLHFDataset(file, ByteTokenizer("template"), CONFIG)[0]
    assert bytes(row["raw_prompt_ids"]) == b"[user]who?[me]"


def test_search_r1s_arguments_are_taken(tmp_path):
    """As in its verl/trainer/ppo/ray_trainer.py, `_create_dataloader` (Search-R1 a14dc3a)."""
    arguments = {
        "prompt_key": "prompt",
        "max_prompt_length": 4,
        "filter_prompts": True,
        "return_raw_chat": True,
    }
    file = write(tmp_path / "a.parquet", ["where?"])
    row = RLHFDataset(parquet_files=file, tokenizer=ByteTokenizer(), **arguments, truncation="left")[0]
    assert bytes(row["raw_prompt_ids"]) == b"ere?"


def test_a_subset_is_search_r1s_subset_and_all_rows_if_there_are_fewer(tmp_path, capsys):
    questions = [f"q{i}" for i in range(50)]
    file = write(tmp_path / "a.parquet", questions)
    dataset = RLHFDataset(file, ByteTokenizer(), CONFIG, num_rows=7)
    expected = pd.read_parquet(file).sample(7, random_state=42)["prompt"].map(lambda p: p[0]["content"])
    assert [bytes(dataset[i]["raw_prompt_ids"]).decode() for i in range(7)] == expected.tolist()
    RLHFDataset(file, ByteTokenizer(), CONFIG, num_rows=51)
    assert "51 rows of" in (said := capsys.readouterr().out) and "all 50 are taken" in said


def test_missing_files_columns_and_rows_are_named(tmp_path):
    with pytest.raises(ValueError, match="Found no file at .*nothing.parquet"):
        RLHFDataset(str(tmp_path / "nothing.parquet"), ByteTokenizer(), CONFIG)
    file = write(tmp_path / "a.parquet", ["who?"])
    with pytest.raises(ValueError, match="no column question .*data.prompt_key"):
        RLHFDataset(file, ByteTokenizer(), {**CONFIG, "prompt_key": "question"})
    with pytest.raises(ValueError, match="Found no rows"):
        RLHFDataset(write(tmp_path / "empty.parquet", []), ByteTokenizer(), CONFIG)


def test_long_prompts_keep_their_end_or_are_refused_before_anything_starts(tmp_path, capsys):
    file = write(tmp_path / "a.parquet", ["x" * 10 + "y" * 20, "z" * 41, "w" * 40, "v" * 50])
    with pytest.raises(ValueError, match=r"2 of 4 prompts in .*a.parquet.*row 1, 41 tokens: 'zzz.*length=40"):
        RLHFDataset(file, ByteTokenizer(), CONFIG)
    left = RLHFDataset(file, ByteTokenizer(), {**CONFIG, "truncation": "left"})
    assert bytes(left[0]["raw_prompt_ids"]) == b"y" * 20
    assert bytes(left[1]["raw_prompt_ids"]) == b"z" * 20
    assert capsys.readouterr().out == (
        "note: a prompt has 30 tokens; the last data.max_start_length=20 are used\n"
    ), "said once"


def test_prompts_that_can_not_be_read_are_named_where_lengths_are_looked_at(tmp_path):
    path = tmp_path / "rows.jsonl"
    prompts = ["x" * 2000, None, [{"role": "user", "content": 5}]]
    rows = [{"prompt": prompt, "data_source": "nq", "reward_model": {}} for prompt in prompts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match="Found 2 of 3 rows that can't be asked") as refused:
        RLHFDataset(str(path), ByteTokenizer(), {"max_prompt_length": 4000})
    assert f"{path}, line 2, column prompt: prompt holds None" in str(refused.value)
    assert f"{path}, line 3, column prompt: message 0 of prompt has the content 5" in str(refused.value)


def test_rows_of_jsonl_are_those_of_parquet(tmp_path):
    parquet = write(tmp_path / "a.parquet", ["who?", "where?"])
    lines = [{**row, "prompt": list(row["prompt"])} for row in pd.read_parquet(parquet).to_dict("records")]
    text = "\n\n".join(json.dumps(line, default=lambda array: array.tolist()) for line in lines)
    (tmp_path / "a.jsonl").write_text(text)
    both = [RLHFDataset(file, ByteTokenizer(), CONFIG) for file in (parquet, str(tmp_path / "a.jsonl"))]
    assert [str(both[0][i]).replace("array(", "").count("WHO") for i in (0, 1)] == [1, 0]
    for one, other in zip(*([data[i] for i in (0, 1)] for data in both), strict=True):
        assert list(one["reward_model"]["ground_truth"].pop("target")) == other["reward_model"][
            "ground_truth"
        ].pop("target")
        assert one == other
    (tmp_path / "a.jsonl").write_text(text + "\n[1]\n")
    with pytest.raises(ValueError, match=r"a.jsonl, line 4: found list; expected an object"):
        RLHFDataset(str(tmp_path / "a.jsonl"), ByteTokenizer(), CONFIG)


def test_rows_of_skyrl_bring_reward_spec_and_keep_their_columns(tmp_path):
    row = {"data_source": "openai/gsm8k", "prompt": "1 + 1?", "env_class": "gsm8k", "db_id": "x"}
    row["reward_spec"] = {"method": "rule", "ground_truth": "2"}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    dataset = RLHFDataset(str(tmp_path / "a.jsonl"), ByteTokenizer(), CONFIG)
    assert dataset[0]["reward_model"] == row["reward_spec"] and dataset.rows[0]["db_id"] == "x"


def test_too_long_prompts_are_skipped_if_asked_for(tmp_path, capsys):
    file = write(tmp_path / "a.parquet", ["short", "x" * 41, "brief"])
    dataset = RLHFDataset(file, ByteTokenizer(), {**CONFIG, "truncation": "skip"})
    assert [bytes(dataset[i]["raw_prompt_ids"]) for i in range(len(dataset))] == [b"short", b"brief"]
    assert "1 of 3 prompts" in capsys.readouterr().out
    with pytest.raises(ValueError, match="2 of 2 prompts"):
        file = write(tmp_path / "b.parquet", ["x" * 41, "x" * 50])
        RLHFDataset(file, ByteTokenizer(), {**CONFIG, "truncation": "skip"})


def batches(sampler: PromptSampler, count: int) -> list[list[int]]:
    return [sampler.take(sampler.batch_size) for _ in range(count)]


def test_an_epoch_shows_each_row_at_most_once_in_a_new_order():
    sampler = PromptSampler(num_rows=10, batch_size=3, shuffle=True, seed=0)
    assert len(sampler) == 3
    first = batches(sampler, 3)
    second = batches(sampler, 3)
    for epoch in (first, second):
        rows = [row for batch in epoch for row in batch]
        assert len(set(rows)) == 9 and set(rows) <= set(range(10))
    assert first != second
    assert first == batches(PromptSampler(10, 3, True, 0), 3)
    assert first != batches(PromptSampler(10, 3, True, 1), 3)


def test_without_shuffling_the_order_is_the_files():
    sampler = PromptSampler(5, 2, shuffle=False, seed=0)
    assert batches(sampler, 3) == [[0, 1], [2, 3], [0, 1]]


@pytest.mark.parametrize("done", [0, 1, 3, 4, 7])
def test_rule_10_a_restarted_run_sees_the_same_batches(done):
    undisturbed = batches(PromptSampler(10, 3, True, 5), 12)
    killed = PromptSampler(10, 3, True, 5)
    batches(killed, done)
    resumed = PromptSampler(10, 3, True, 5)
    resumed.load_state_dict(killed.state_dict())
    assert batches(resumed, 12 - done) == undisturbed[done:]


def test_a_position_in_other_data_is_refused():
    state = PromptSampler(10, 3, True, 5).state_dict()
    with pytest.raises(ValueError, match="num_rows=11, but the checkpoint was made with 10"):
        PromptSampler(11, 3, True, 5).load_state_dict(state)


def test_fewer_rows_than_a_batch_is_an_error():
    with pytest.raises(ValueError, match="data.train_batch_size=2 or less"):
        PromptSampler(2, 3, True, 0)
    assert np.all(np.sort(PromptSampler(3, 3, True, 0).take(3)) == np.arange(3))


def test_a_step_that_needs_more_prompts_takes_the_next_ones_and_resumes_behind_them():
    sampler = PromptSampler(10, 4, shuffle=False, seed=0)
    assert [sampler.take(4), sampler.take(1), sampler.take(3)] == [[0, 1, 2, 3], [4], [5, 6, 7]]
    resumed = PromptSampler(10, 4, shuffle=False, seed=0)
    resumed.load_state_dict(sampler.state_dict())
    for one in (sampler, resumed):
        assert one.take(2) == [8, 9] and one.take(4) == [0, 1, 2, 3] and one.epoch == 1


def steps_with_refills(sampler: PromptSampler, num_steps: int, seed: int) -> list[list[int]]:
    """Rows of each step: a batch, then up to three refills by chance, which know what was asked before."""
    rng = np.random.default_rng(seed)
    steps = []
    for _ in range(num_steps):
        asked: list[int] = []
        for count in (sampler.batch_size, *rng.integers(1, 12, rng.integers(0, 4)).tolist()):
            asked += sampler.take(count, sorted(asked))
        steps.append(asked)
    return steps


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_refill_that_crosses_an_epoch_asks_no_prompt_twice_in_a_step(shuffle):
    sampler = PromptSampler(64, 16, shuffle, seed=0)
    steps = steps_with_refills(sampler, 400, seed=0)
    assert [step for step in steps if len(set(step)) < len(step)] == []
    assert sampler.epoch > 100


def test_a_prompt_that_is_postponed_comes_first_as_soon_as_it_may_be_asked():
    sampler = PromptSampler(6, 2, shuffle=False, seed=0)
    for _ in range(3):
        sampler.take(2)
    assert sampler.take(2, [0, 2, 5]) == [1, 3]  # 0 and 2 were asked in the epoch before
    assert sampler.take(1, [2]) == [0]
    assert [sampler.take(2), sampler.take(1)] == [[2, 4], [5]]  # every row once in this epoch
    assert sampler.epoch == 1


def test_rows_are_asked_again_only_where_all_others_were_asked():
    sampler = PromptSampler(6, 4, shuffle=False, seed=0)
    assert sampler.take(4) == [0, 1, 2, 3]
    assert sampler.take(4, [0, 1, 2, 3])[:2] == [4, 5]
    for count in range(1, 30):
        drawn = PromptSampler(6, 4, True, 0).take(count, [1, 4])
        assert len(drawn) == count and not set(drawn[:4]) & {1, 4}
        for start in range(0, count, 6):
            assert len(set(drawn[start : start + 6])) == len(drawn[start : start + 6])


@pytest.mark.parametrize("done", [1, 7, 30])
def test_rule_10_a_run_with_refills_and_postponed_prompts_resumes_to_the_same_prompts(done):
    killed = PromptSampler(20, 8, True, 3)
    steps_with_refills(killed, done, seed=done)
    killed.take(8, list(range(0, 20, 2)))
    resumed = PromptSampler(20, 8, True, 3)
    resumed.load_state_dict(json.loads(json.dumps(killed.state_dict())))
    assert steps_with_refills(resumed, 40, seed=1) == steps_with_refills(killed, 40, seed=1)
    state = killed.state_dict()
    del state["postponed"]  # as versions before had it
    PromptSampler(20, 8, True, 3).load_state_dict(state)


@pytest.mark.parametrize("retired", [set(), {0, 3, 7, 11}])
def test_without_a_refill_the_order_is_that_of_epochs_one_after_the_other(retired):
    sampler = PromptSampler(21, 4, True, 9)
    sampler.retired = set(retired)
    expected = []
    for epoch in range(6):
        rows = [
            row for row in np.random.default_rng([9, epoch]).permutation(21).tolist() if row not in retired
        ]
        expected += [rows[i : i + 4] for i in range(0, len(rows) - 3, 4)]
    assert batches(sampler, len(expected)) == expected
