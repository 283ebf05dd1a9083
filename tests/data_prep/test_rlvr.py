"""Public rows with verifiable rewards become rows of ours, and gold answers are checked."""

from __future__ import annotations

import json

import pandas as pd
import pytest

from data_prep.rlvr import main
from verl.data.rl_dataset import RLHFDataset
from verl.verifiers.registry import assigned_verifiers

USER = {"role": "user", "content": "What is 2 + 2?"}
CASES = [{"type": "stdin_stdout", "input": "2\n", "output": "4\n", "fn_name": None}]
OPEN_INSTRUCT = [
    {"messages": [USER], "ground_truth": "4", "dataset": "gsm8k"},
    {"messages": [USER, {"role": "assistant", "content": "<answer>yes</answer>"}], "ground_truth": ["yes"],
     "dataset": ["string_matcher"], "tools": ["search"]},
    {"messages": [{"role": "system", "content": "s"}, USER], "ground_truth": ["4", [1, 2]], "dataset":
     ["gsm8k", "passthrough"]},
]  # fmt: skip
PRIME = [
    {"prompt": "q", "task_type": "verifiable_math", "verification_info": '{"ground_truth": "4"}'},
    {"prompt": "q", "task_type": "verifiable_code", "gold_standard_solution": "```python\nprint(4)\n```",
     "verification_info": str({"language": "python", "test_cases": CASES})},
    {"prompt": "q", "task_type": "code", "verification_info": {"test_cases": [
        {"type": "function_call", "fn_name": "f", "input": [1, "a"], "output": [3]}]}},
    {"prompt": "q", "task_type": "code", "verification_info": json.dumps(
        {"fn_name": "f", "test_case_inputs": ["[1, 2]", "x"], "test_case_outputs": ["3", '"y"']})},
    {"prompt": "q", "task_type": "llm_judgeable", "gold_standard_solution": "because",
     "verification_info": {"judging_instructions": "compare"}},
]  # fmt: skip
VERIFIERS = [
    {"question": "2 + 2?", "answer": "4", "info": {"level": 1}},
    {"prompt": [USER], "answer": "4", "info": '{"level": 2}'},
]
TRL = [{"prompt": [USER], "solution": "4"}, {"prompt": "2 + 2?", "answer": "4"}]


def converted(tmp_path, format_: str, records: list[dict], *more: str) -> list[dict]:
    source = tmp_path / "in.jsonl"
    out = tmp_path / "out.parquet"
    source.write_text("\n".join(map(json.dumps, records)))
    assert main(["--format", format_, "--input", str(source), "--out", str(out), *more]) == 0
    return pd.read_parquet(out).to_dict("records")


class ByteTokenizer:
    chat_template = bos_token_id = None

    def encode(self, text, add_special_tokens, verbose):
        return list(text.encode())


def assigned(rows: list[dict]) -> list[list[tuple]]:
    data = RLHFDataset(rows, ByteTokenizer())  # the trainer reads them
    assert len([data[i] for i in range(len(data))]) == len(rows)
    return [[(e.name, e.label, e.weight) for e in assigned_verifiers(row["reward_model"])] for row in rows]


def test_rows_of_open_instruct(tmp_path):
    rows = converted(tmp_path, "open-instruct", OPEN_INSTRUCT)
    assert assigned(rows) == [
        [("gsm8k", "4", 1)],
        [("string_matcher", "yes", 1)],
        [("gsm8k", "4", 1), ("passthrough", "[1, 2]", 1)],
    ]
    assert [len(row["prompt"]) for row in rows] == [1, 1, 2]  # the assistant's message is the solution
    assert json.loads(rows[1]["extra_info"]["info"]) == {"tools": ["search"]}


def test_rows_of_prime(tmp_path):
    made = assigned(converted(tmp_path, "prime", PRIME))
    assert made[0] == [("math", "4", 1)] and made[4] == [("general-quality_ref", "because", 1)]
    assert json.loads(made[1][0][1]) == [{"input": "2\n", "output": "4\n"}] and made[1][0][0] == "code_stdio"
    assert json.loads(made[2][0][1]) == ["assert f(1, 'a') in ([3], 3)"] and made[2][0][0] == "code"
    assert json.loads(made[3][0][1]) == ["assert f(1, 2) == 3", "assert f('x') == 'y'"]


def test_rows_of_verifiers_and_trl(tmp_path):
    rows = converted(tmp_path, "verifiers", VERIFIERS, "--verifier", "gsm8k", "--name", "sums")
    assert assigned(rows) == [[("gsm8k", "4", 1)]] * 2 and rows[0]["data_source"] == "sums"
    assert [json.loads(row["extra_info"]["info"])["level"] for row in rows] == [1, 2]
    made = converted(tmp_path, "trl", TRL[1:])
    assert assigned(made) == [[("math", "4", 1)]]
    pd.DataFrame(TRL[1:]).to_parquet(tmp_path / "in.parquet")
    line = ["--input", str(tmp_path / "in.parquet"), "--out", str(tmp_path / "again.parquet")]
    assert main(["--format", "trl", *line]) == 0
    assert str(pd.read_parquet(tmp_path / "again.parquet").to_dict("records")) == str(made)


def test_check_lists_gold_answers_that_are_refused(tmp_path, capsys):
    source = tmp_path / "in.jsonl"
    wrong = {**OPEN_INSTRUCT[1], "ground_truth": "no"}  # the row's own solution says yes
    ungraded = {"messages": [USER], "ground_truth": "[]", "dataset": "max_length"}
    source.write_text("\n".join(map(json.dumps, [*OPEN_INSTRUCT[:2], wrong, ungraded])))
    line = ["--format", "open-instruct", "--input", str(source), "--check"]
    assert main(line) == 1
    printed = capsys.readouterr().out
    assert "in.jsonl, line 3: refused by string_matcher (score 0" in printed and "line 2" not in printed
    assert "4 rows: 1 refused, 0 could not be verified, 1 without answer" in printed
    source.write_text("\n".join(map(json.dumps, OPEN_INSTRUCT[:2])))
    assert main(line) == 0


def test_what_could_not_be_verified_is_listed_apart_and_no_failure(tmp_path, capsys, monkeypatch):
    from verl.verifiers import CouldNotVerify
    from verl.verifiers.text import TextVerifier

    def away(self, samples):
        raise CouldNotVerify("the server is away")

    monkeypatch.setattr(TextVerifier, "verify_many", away)
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps(OPEN_INSTRUCT[0]))
    assert main(["--format", "open-instruct", "--input", str(source), "--check"]) == 0
    assert "1 rows: 0 refused, 1 could not be verified" in capsys.readouterr().out


@pytest.mark.parametrize(
    "format_, record, message",
    [
        ("open-instruct", {"messages": [USER], "dataset": "gsm8q", "ground_truth": "4"}, "mean 'gsm8k'"),
        ("open-instruct", {"messages": [USER], "dataset": ["a", "b"], "ground_truth": ["4"]}, "2 verifiers"),
        ("prime", {"prompt": "q", "verification_info": "{oops"}, "neither JSON nor a Python literal"),
        ("prime", {"prompt": "q", "verification_info": {"x": 1}, "task_type": "z"}, "can't be verified"),
        (
            "prime",
            {"prompt": "q", "verification_info": {"test_cases": [{}]}},
            "can't be read (KeyError('type')",
        ),
        ("trl", {"prompt": "q"}, "no solution or answer or ground_truth"),
        ("verifiers", {"answer": "q"}, "expected text or messages in prompt or question"),
    ],
)
def test_rows_that_cant_be_used_are_named(tmp_path, capsys, format_, record, message):
    source = tmp_path / "in.jsonl"
    out = tmp_path / "out.parquet"
    source.write_text(json.dumps(record))
    assert main(["--format", format_, "--input", str(source), "--out", str(out)]) == 2
    assert "in.jsonl, line 1: " in (said := capsys.readouterr().err) and message in said
    assert list(tmp_path.iterdir()) == [source]
    assert main(["--format", format_, "--input", str(source)]) == 2  # neither --out nor --check
