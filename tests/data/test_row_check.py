"""All rows are looked at before a run starts: with its own tokenizer, template, vocabulary and scorers."""

import json
import random
import re
import unicodedata
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from verl.config import load_config
from verl.config.environments import VerifiersConfig
from verl.data.rl_dataset import RLHFDataset
from verl.data.row_check import RowCheck, check_small_files
from verl.data.streaming import RowStream
from verl.environments.environment import BaseTextEnv
from verl.environments.registry import make
from verl.utils.reward_score import default_compute_score
from verl.verifiers.registry import Verifiers, assigned_verifiers
from verl.verifiers.verifier import Sample, VerifierSettings

MODEL = str(Path(__file__).parents[2] / "data_prep" / "base_model")
TOKENIZER = AutoTokenizer.from_pretrained(MODEL)
TEMPLATE = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}me: "
)
PROMPT = [{"role": "user", "content": "Question: Who made it?\n"}]
ROW = {
    "data_source": "nq",
    "prompt": PROMPT,
    "reward_model": {"style": "rule", "ground_truth": {"target": ["Arlen"]}},
    "extra_info": {"index": 0, "split": "train"},
}
SETTINGS = {"prompt_key": "prompt", "truncation": "left", "max_prompt_length": 4096}


@pytest.fixture(autouse=True)
def cache_of_this_test(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


class PickyEnv(BaseTextEnv):
    def __init__(self, env_config=None, extras=None):
        super().__init__()
        assert extras["level"] < 3, "no such level"


def with_target(target):
    return ROW | {"reward_model": {"ground_truth": {"target": target}}}


def check(dataset, tokenizer=TOKENIZER, vocab_size=None, needs_answers=True) -> RowCheck:
    verifiers = Verifiers(VerifierSettings(VerifiersConfig()))
    return RowCheck([dataset], tokenizer, vocab_size, verifiers, needs_answers, {}, 2, 500)


def refusal(*rows, tokenizer=TOKENIZER, **options) -> str:
    """Return the message of the look at rows, "" if they are fine."""
    try:
        check(RLHFDataset(list(rows), tokenizer, SETTINGS), tokenizer, **options).check()
    except ValueError as error:
        return str(error)
    return ""


@pytest.fixture
def template_tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.mark.parametrize(
    "row, column, reason",
    [
        (with_target([]), "reward_model", "expected golden answers"),
        (with_target(None), "reward_model", "expected golden answers"),
        (with_target([""]), "reward_model", "without a letter"),
        (with_target([b"Arlen"]), "reward_model", "b'Arlen'"),
        (with_target([{"answer": "Arlen"}]), "reward_model", "expected text or a number"),
        (with_target([True]), "reward_model", "True"),
        (with_target([float("nan")]), "reward_model", "nan"),
        (with_target("['Arlen' 'Tom']"), "reward_model", "a list as text"),
        (with_target("['Arlen', 'Tom']"), "reward_model", "a list as text"),
        (with_target("[1, 2]"), "reward_model", "a list as text"),
        (with_target(["half \ud83d"]), "reward_model", "half of a letter"),
        (ROW | {"reward_model": None}, "reward_model", "expected golden answers"),
        (ROW | {"reward_model": "rule"}, "reward_model", "expected a struct"),
        (ROW | {"reward_model": ["rule"]}, "reward_model", "expected a struct"),
        (ROW | {"prompt": None}, "prompt", "None"),
        (ROW | {"prompt": []}, "prompt", r"\[\]"),
        (ROW | {"prompt": ""}, "prompt", "expected a question"),
        (ROW | {"prompt": [{"role": "user", "content": " \n"}]}, "prompt", "expected a question"),
        (ROW | {"prompt": [{"role": "user", "content": "\ud83d"}]}, "prompt", "half of a letter"),
        (ROW | {"prompt": b"Who?"}, "prompt", "expected text or chat messages"),
        (ROW | {"prompt": 5}, "prompt", "expected text or chat messages"),
        (ROW | {"prompt": ["Who?"]}, "prompt", "expected {role, content}"),
        (ROW | {"prompt": "[{'role': 'user', 'content': 'Who?'}]"}, "prompt", "as Python prints it"),
        (ROW | {"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "prompt", "text parts"),
        (ROW | {"prompt": [{"role": "user", "content": 5}]}, "prompt", "the content 5"),
        (ROW | {"extra_info": [1]}, "extra_info", "expected a struct"),
        (ROW | {"data_source": 5}, "data_source", "expected text"),
        (ROW | {"env_class": 5}, "env_class", "expected text"),
        (ROW | {"max_turns": "many"}, "max_turns", "whole number"),
        (ROW | {"max_turns": float("inf")}, "max_turns", "whole number"),
        (ROW | {"max_turns": True}, "max_turns", "whole number"),
        (
            ROW | {"reward_model": {"ground_truth": {"verifiers": [{"name": "max_length", "label": "x"}]}}},
            "reward_model",
            "number of tokens",
        ),
        (ROW | {"reward_model": {"ground_truth": {"verifiers": 5}}}, "reward_model", "list of entries"),
        (ROW | {"reward_model": {"verifier": 5, "ground_truth": "7"}}, "reward_model", "list of names"),
        (ROW | {"env_class": "gsm8k", "reward_model": None}, "reward_model", "right answer"),
        (ROW | {"env_class": "gsm8k"}, "reward_model", "right answer"),
        (ROW | {"env_class": f"{__name__}:PickyEnv", "level": 7}, "reward_model", "no such level"),
    ],
)
def test_a_row_that_no_run_can_use_is_named_with_its_column(row, column, reason):
    message = refusal(ROW, row)
    assert message.startswith("Found 1 of 2 rows") and f"the rows given, row 1, column {column}: " in message

    assert re.search(reason, message), message


@pytest.mark.parametrize(
    "row",
    [
        with_target("Arlen"),
        with_target(np.array(["Arlen"])),
        with_target(("Arlen",)),
        with_target(["Tom", None, "Arlen"]),
        with_target('["Arlen", "Tom"]'),
        with_target([["Arlen"]]),
        ROW | {"reward_model": json.dumps(ROW["reward_model"])},
        ROW | {"reward_model": {"ground_truth": json.dumps({"target": ["Arlen"]})}},
        ROW | {"prompt": np.array(PROMPT, dtype=object)},
        ROW | {"prompt": tuple(PROMPT)},
        ROW | {"prompt": json.dumps(PROMPT)},
        ROW | {"prompt": [{"role": "user", "content": [{"type": "text", "text": PROMPT[0]["content"]}]}]},
        ROW | {"prompt": PROMPT[0]["content"]},
        ROW | {"extra_info": None, "data_source": None},
        ROW | {"extra_info": json.dumps({"index": 4, "max_turns": 1})},
    ],
)
def test_a_cell_in_another_form_is_read_as_what_it_holds(row):
    assert refusal(row) == ""
    item = RLHFDataset([row], TOKENIZER, SETTINGS)[0]
    assert item["raw_prompt_ids"] == RLHFDataset([ROW], TOKENIZER, SETTINGS)[0]["raw_prompt_ids"]
    truth = item["reward_model"]["ground_truth"]
    assert default_compute_score("nq", "<answer>arlen</answer>", truth) == 1.0


def test_several_messages_are_joined_without_a_template_and_refused_by_name_where_the_template_refuses(
    template_tokenizer,
):
    system = {"role": "system", "content": "Be brief."}
    row = ROW | {"prompt": [system, *PROMPT]}
    item = RLHFDataset([row], TOKENIZER, SETTINGS)[0]
    assert TOKENIZER.decode(item["raw_prompt_ids"]).endswith("Be brief.\nQuestion: Who made it?\n")
    earlier = [{"role": "user", "content": "Old?\n"}, {"role": "assistant", "content": "Yes.\n"}, *PROMPT]
    item = RLHFDataset([ROW | {"prompt": earlier}], TOKENIZER, SETTINGS)[0]
    assert TOKENIZER.decode(item["raw_prompt_ids"]).endswith("Old?\nYes.\nQuestion: Who made it?\n")
    assert refusal(row) == "" and refusal(ROW, tokenizer=template_tokenizer) == ""
    message = refusal(ROW, row, tokenizer=template_tokenizer)
    assert "row 1, column prompt" in message and "System role not supported" in message
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    assert "no chat template" in refusal(ROW | {"prompt": [*PROMPT, call]})


def test_a_token_beyond_the_models_vocabulary_is_named():
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    size = len(tokenizer)
    tokenizer.add_tokens(["<tool>"])
    row = ROW | {"prompt": "<tool>Who?"}
    message = refusal(ROW, row, tokenizer=tokenizer, vocab_size=size)
    assert "row 1, column prompt: found the token '<tool>'" in message and f"below {size}" in message
    assert refusal(ROW, row, tokenizer=tokenizer, vocab_size=size + 1) == ""


def test_golden_answers_are_for_those_who_compare_with_them():
    assert refusal(with_target([]), needs_answers=False) == ""
    label = {"ground_truth": {"verifiers": [{"name": "math", "label": "7"}]}}
    assert refusal(ROW | {"reward_model": label}) == ""


def test_ten_mistakes_are_named_and_all_are_counted(tmp_path):
    file = tmp_path / "rows.jsonl"
    lines = [json.dumps(ROW if number % 2 else with_target([])) for number in range(50)]
    file.write_text("\n\n".join(lines))
    with pytest.raises(ValueError, match="Found 25 of 50 rows") as problem:
        check(RLHFDataset(str(file), TOKENIZER, SETTINGS)).check()
    message = str(problem.value)
    assert message.count("column reward_model") == 10 and f"{file}, line 5, column" in message
    assert message.endswith("and 15 more")


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_streams_are_looked_at_to_their_end(tmp_path, suffix):
    rows = [with_target(["x"]) | {"prompt": f"Question {number}?"} for number in range(3000)]
    rows[2900] = ROW | {"prompt": ""}
    files = [tmp_path / f"{name}.{suffix}" for name in "ab"]
    for file in files:
        if suffix == "jsonl":
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            for row in rows:
                row["prompt"] = row["prompt"] if isinstance(row["prompt"], str) else "Who?"
            pq.write_table(pa.Table.from_pylist(rows), file, row_group_size=700)
    stream = RowStream(files, TOKENIZER, SETTINGS)
    with pytest.raises(ValueError, match="Found 2 of 6000 rows") as problem:
        check(stream).check()
    number = "line 2901" if suffix == "jsonl" else "row 2900"
    assert all(f"{file}, {number}, column prompt" in str(problem.value) for file in files)


def test_structs_of_a_table_lose_the_nulls_that_their_rows_never_had(tmp_path):
    call = {"id": "a", "kwargs": {"depth": 2}}
    rows = [
        ROW | {"env_class": "aime", "world": call, "reward_model": {"ground_truth": "7"}},
        ROW | {"env_class": "aime", "world": {"id": "b", "name": "n"}, "reward_model": {"ground_truth": "8"}},
    ]
    pd.DataFrame(rows).to_parquet(tmp_path / "rows.parquet")
    data = RLHFDataset(str(tmp_path / "rows.parquet"), TOKENIZER, SETTINGS)
    assert data[0]["episode"]["extras"]["world"] == call
    assert data[1]["episode"]["extras"]["world"] == {"id": "b", "name": "n"}
    table = pa.table(
        {
            "prompt": ["Who?"],
            "data_source": ["nq"],
            "reward_model": pa.array([[("target", "x")]], pa.map_(pa.string(), pa.string())),
        }
    )
    pq.write_table(table, tmp_path / "map.parquet")
    data = RLHFDataset(str(tmp_path / "map.parquet"), TOKENIZER, SETTINGS)
    assert data[0]["reward_model"] == {"target": "x", "ground_truth": None}


def test_a_look_is_remembered_until_something_that_it_depends_on_changes(tmp_path, monkeypatch):
    file = tmp_path / "rows.parquet"
    pd.DataFrame([ROW]).to_parquet(file)
    looked = []
    monkeypatch.setattr(RowCheck, "_check_chunk", lambda self, *chunk: looked.append(1) or [])

    def look(tokenizer=TOKENIZER, **options) -> int:
        looked.clear()
        check(RLHFDataset(str(file), tokenizer, SETTINGS), tokenizer, **options).check()
        return len(looked)

    assert [look(), look(), look(vocab_size=9), look(needs_answers=False), look()] == [1, 0, 1, 1, 0]
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template = TEMPLATE
    assert [look(tokenizer), look(tokenizer)] == [1, 0]
    pd.DataFrame([ROW, ROW]).to_parquet(file)
    assert [look(), look()] == [1, 0]


def test_small_files_are_looked_at_without_a_tokenizer(tmp_path):
    for name, rows in (("train", [ROW, with_target([])]), ("val", [ROW])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = [f"data.{name}_files={tmp_path}/{name}.jsonl" for name in ("train", "val")]
    with pytest.raises(ValueError, match="train.jsonl, line 2, column reward_model: .*golden answers"):
        check_small_files(load_config(files))
    check_small_files(load_config([f"data.train_files={tmp_path}/val.jsonl", files[1]]))
    source = {"path": f"{tmp_path}/train.jsonl", "name": "n"}
    with pytest.raises(ValueError, match="train.jsonl, line 2, column reward_model"):
        check_small_files(load_config([f"data.mixture={json.dumps([source])}", files[1]]))


# ------------------------------------------------------------------- 1,000 damaged rows


def damages(rng: random.Random) -> list:
    """Return functions that damage a cell: its type, its nulls, its nesting, its encoding, its size."""
    half = "\ud83d"
    deep: list = []
    for _ in range(200):
        deep = [deep]
    return [
        lambda value: None,
        lambda value: float("nan"),
        lambda value: float("inf"),
        lambda value: rng.randrange(-9, 9),
        lambda value: True,
        lambda value: b"caf\xe9",
        lambda value: str(value).encode(),
        lambda value: [],
        lambda value: {},
        lambda value: "",
        lambda value: " \n",
        lambda value: deep,
        lambda value: [value],
        lambda value: {"value": value},
        lambda value: (value,),
        lambda value: [None, value],
        lambda value: [value, value],
        lambda value: json.dumps(value),
        lambda value: json.dumps([value]),
        lambda value: repr(value),
        lambda value: str(np.array([value, value], dtype=object)),
        lambda value: np.array([value], dtype=object),
        lambda value: np.array(value, dtype=object),
        lambda value: value + half if isinstance(value, str) else half,
        lambda value: unicodedata.normalize("NFD", value) if isinstance(value, str) else value,
        lambda value: value * 2000 if isinstance(value, str) else [value] * 2000,
        lambda value: "\x00" + value if isinstance(value, str) else "\x00",
        lambda value: pd.Timestamp("2026-01-01"),
        lambda value: {"a", "b"},
        lambda value: 10**400,
    ]


def paths_of(value, path=()) -> list[tuple]:
    """Return the paths of all cells in a row, whole columns and what is nested in them."""
    entries = ()
    if isinstance(value, dict):
        entries = value.items()
    elif isinstance(value, list):
        entries = enumerate(value)
    below = [deeper for key, item in entries for deeper in paths_of(item, (*path, key))]
    return ([path] if path else []) + below


def cell_at(value, path):
    for key in path:
        value = value[key]
    return value


def damaged(value, path, damage):
    """Return a copy of a value with the cell at a path damaged."""
    if not path:
        return damage(value)
    copied = dict(value) if isinstance(value, dict) else list(value)
    copied[path[0]] = damaged(value[path[0]], path[1:], damage)
    return copied


FUZZED = [
    # a valid row, the text that answers it, the text that does not
    (ROW, "<answer>Arlen</answer>", "<answer>Tom</answer>"),
    (with_target(["Café Zoë", "Tom"]), "<answer>café zoë</answer>", "<answer>Arlen</answer>"),
    (
        ROW
        | {"reward_model": {"ground_truth": {"verifiers": [{"name": "gsm8k", "label": "7", "weight": 1.0}]}}},
        "It is 7",
        "It is 8",
    ),
    (ROW | {"env_class": "gsm8k", "reward_model": {"ground_truth": "7"}}, "#### 7", "#### 8"),
    (
        ROW | {"max_turns": 2, "extra_info": {"question": "Who?"}},
        "<answer>Arlen</answer>",
        "<answer>b</answer>",
    ),
]


def scored(item, text) -> float:
    """Score a text as a run scores it: by the row's environment, its verifiers, or exact match."""
    episode = item["episode"]
    if episode is not None and episode["env_class"] not in ("search", "single_turn"):
        env = make(episode["env_class"], env_config={}, extras=episode["extras"])
        return env.step(text)["reward"]
    assigned = assigned_verifiers(item["reward_model"], item)
    if assigned:
        return VERIFIERS_OF_RUN.verify([(Sample(text, None), assigned)])[0].score
    return default_compute_score(item["data_source"], text, item["reward_model"]["ground_truth"])


VERIFIERS_OF_RUN = Verifiers(VerifierSettings(VerifiersConfig()))


def test_a_thousand_damaged_rows_are_refused_by_name_or_asked_and_scored_as_before(
    template_tokenizer, capsys
):
    rng = random.Random(31)
    num_refused = 0
    for number in range(1000):
        row, right, wrong = FUZZED[number % len(FUZZED)]
        tokenizer = (TOKENIZER, template_tokenizer)[number % 2]
        path = rng.choice(paths_of(row))
        bad_row = damaged(row, path, rng.choice(damages(rng)))
        message = refusal(row, bad_row, tokenizer=tokenizer, vocab_size=len(tokenizer))
        if message:
            num_refused += 1
            assert "the rows given, row 1, column " in message, (bad_row, message)
            continue
        item = RLHFDataset([bad_row], tokenizer, SETTINGS)[0]
        if path == ("env_class",) and item["episode"] is None:
            continue  # an empty cell names the run's own environment
        assert item["raw_prompt_ids"], bad_row
        if "an empty golden answer beside others" in capsys.readouterr().out:
            continue  # the user is told
        json.dumps(item["data_source"]).encode()
        if path[-1] == "weight" or isinstance(cell_at(bad_row, path), int):
            assert scored(item, right) >= 0  # another weight, or a number as the answer
            continue
        assert [scored(item, right), scored(item, wrong)] == [1.0, 0.0], (path, bad_row)
    assert 300 < num_refused < 800
