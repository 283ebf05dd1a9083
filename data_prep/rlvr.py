"""Rows with verifiable rewards, as others publish them, as rows of ours.

    python -m data_prep.rlvr --format open-instruct --input data.jsonl --out rows.parquet
    python -m data_prep.rlvr --format prime --input data.parquet --check      gold answers, by their verifiers

    open-instruct  messages, ground_truth, dataset (a verifier, or a list of them), tools
    prime          prompt, task_type, verification_info (JSON or a Python literal), gold_standard_solution
    verifiers      prompt or question, answer, info (an object or JSON)            with --verifier
    trl            prompt, and solution, answer or ground_truth                    with --verifier

    -> prompt, data_source, reward_model.ground_truth.verifiers [{name, label, weight}],
       extra_info {index, split, info}; labels and info are text, JSON where they are more

--check gives the verifiers each row's gold answer: the solution that the row brings, or else its label in the
form that the verifier reads. Exit status: 0; 1 if an answer is refused; 2 for a mistake of the user.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.files import describe, read_records, take
from verl.config import load_config
from verl.utils.dataset.mixture import verifier
from verl.verifiers.base import Sample, VerifierSettings
from verl.verifiers.batch import Request, Verifiers
from verl.verifiers.registry import Assigned, check_name

FORMATS = ("open-instruct", "prime", "verifiers", "trl")
Read = tuple[str, dict[str, Any], str | None]  # place, row of ours, the solution that it brings

_BATCH = 5_000  # rows that are held at once
_GOLD = {  # how an answer is written for a verifier; not here: a label that is no answer
    "gsm8k": "The answer is {}",
    "math": "\\boxed{{{}}}",
    "strict_math": "\\boxed{{{}}}",
    "flan": "The answer is: {}",
    "string_matcher": "<answer>{}</answer>",
    "string_f1": "<answer>{}</answer>",
    "puzzle": "<answer>{}</answer>",
    "re_search": "<finish>{}</finish>",
    "re_search_f1": "<finish>{}</finish>",
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Rows with verifiable rewards as rows of ours.")
    parser.add_argument("--format", choices=FORMATS, required=True)
    parser.add_argument("--input", type=Path, required=True, help="a .parquet, .jsonl or .json file")
    parser.add_argument("--out", type=Path, help="the parquet file to write; not needed with --check")
    parser.add_argument("--verifier", default="math", help="of rows of verifiers and trl (math)")
    parser.add_argument("--name", help="data_source of the rows; default: the input's name")
    parser.add_argument("--check", action="store_true", help="verify each gold answer")
    options = parser.parse_args(argv)
    try:
        if options.out is None and not options.check:
            raise ValueError("found neither --out nor --check; expected --out FILE.parquet, or --check")
        return convert(options)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def convert(options: argparse.Namespace) -> int:
    """Writes and checks the rows, some thousand at a time. Returns the exit status. ValueError: a bad row."""
    entry = pa.struct({"name": pa.string(), "label": pa.string(), "weight": pa.float64()})
    truth = pa.struct({"verifiers": pa.list_(entry)})
    message = pa.struct({"role": pa.string(), "content": pa.string()})
    schema = pa.schema(
        {
            "prompt": pa.list_(message),
            "data_source": pa.string(),
            "reward_model": pa.struct({"style": pa.string(), "ground_truth": truth}),
            "extra_info": pa.struct({"index": pa.int64(), "split": pa.string(), "info": pa.string()}),
        }
    )
    rows, num_rows = read_rows(options), 0
    tally = {"refused": 0, "could not be verified": 0, "without answer": 0}
    verifiers = Verifiers(VerifierSettings(load_config([]).verifiers))
    partial = options.out and options.out.with_name(f".{options.out.name}.partial")
    writer = partial and pq.ParquetWriter(partial, schema)
    try:
        while batch := list(islice(rows, _BATCH)):
            for where, row, _ in batch:
                for each in row["reward_model"]["ground_truth"]["verifiers"]:
                    try:
                        check_name(each["name"])
                    except ValueError as error:
                        raise ValueError(f"{where}: {error}") from None
            if writer:
                writer.write_table(pa.Table.from_pylist([row for _, row, _ in batch], schema))
            num_rows += len(batch)
            if options.check:
                check(batch, verifiers, tally)
        if num_rows == 0:
            raise ValueError(f"{options.input}: found no rows")
        if writer:
            writer.close()
            partial.replace(options.out)
            print(f"{options.out}: {num_rows:,} rows")
    finally:
        verifiers.close()
        if writer:
            writer.close()
            partial.unlink(missing_ok=True)
    if options.check:
        print(f"{num_rows:,} rows: " + ", ".join(f"{count:,} {what}" for what, count in tally.items()))
    return int(tally["refused"] > 0)


def check(batch: list[Read], verifiers: Verifiers, tally: dict[str, int]) -> None:
    """Prints the rows of a batch whose gold answer is refused or could not be verified, and counts them."""
    asked: list[tuple[str, str, str]] = []
    requests: list[Request] = []
    for where, row, solution in batch:
        query = "\n".join(message["content"] for message in row["prompt"])
        num_asked = len(asked)
        for each in row["reward_model"]["ground_truth"]["verifiers"]:
            name, label, gold = each["name"], each["label"], solution
            if gold is None and name in _GOLD:
                gold = _GOLD[name].format(_first_answer(label))
            if gold is not None:
                asked.append((where, name, label))
                requests.append(Request(Sample(gold, label, query), [Assigned(name, label)]))
        tally["without answer"] += len(asked) == num_asked
    for (where, name, label), result in zip(asked, verifiers.verify(requests), strict=True):
        if result.score is None or result.score < 1:
            what = "could not be verified" if result.score is None else "refused"
            tally[what] += 1
            detail = result.verdicts[0]["detail"]
            print(f"{where}: {what} by {name} (score {result.score}): {label[:80]} {detail}")


def _first_answer(label: str) -> str:
    """The label, or the first of a JSON list of answers."""
    try:
        answers = json.loads(label)
    except ValueError:
        return label
    return str(answers[0]) if isinstance(answers, list) and answers else label


def read_rows(options: argparse.Namespace) -> Iterator[Read]:
    """Each row of the input. ValueError: a bad one."""
    name = options.name or options.input.stem
    for index, (where, record) in enumerate(_records(options.input)):
        if not isinstance(record, dict):
            raise ValueError(f"{where}: expected an object, found {describe(record)}")
        info: Any = None
        if options.format == "open-instruct":
            prompt, solution = _messages(record, ("messages",), where), None
            if len(prompt) > 1 and prompt[-1]["role"] == "assistant":
                solution = prompt.pop()["content"]
            names, labels = take(record, "dataset", object, where), record.get("ground_truth")
            if isinstance(names, str):
                one = isinstance(labels, list) and len(labels) == 1
                names, labels = [names], labels if one else [labels]
            elif isinstance(labels, str):
                labels = [labels]
            if not isinstance(labels, list) or len(labels) != len(names):
                raise ValueError(
                    f"{where}: {len(names)} verifiers in dataset, ground_truth is {describe(labels)}"
                )
            entries = [verifier(str(each), label) for each, label in zip(names, labels, strict=True)]
            info = {"tools": record["tools"]} if record.get("tools") is not None else None
        elif options.format == "prime":
            prompt, solution = _messages(record, ("prompt",), where), record.get("gold_standard_solution")
            entries = [_prime_verifier(record, where)]
            info = {"task_type": record.get("task_type")}
        else:
            names = ("prompt", "question") if options.format == "verifiers" else ("prompt",)
            answers = ("answer",) if options.format == "verifiers" else ("solution", "answer", "ground_truth")
            prompt, solution = _messages(record, names, where), None
            info = _parsed(record.get("info"), where)
            found = [record[each] for each in answers if record.get(each) is not None]
            if not found:
                raise ValueError(f"{where}: no {' or '.join(answers)}; its keys are {sorted(record)}")
            entries = [verifier(options.verifier, found[0])]
        info = None if info is None else json.dumps(info, ensure_ascii=False, default=str)
        row = {
            "prompt": prompt,
            "data_source": name,
            "reward_model": {"style": "rule", "ground_truth": {"verifiers": entries}},
            "extra_info": {"index": index, "split": "train", "info": info},
        }
        yield where, row, solution if solution else None


def _records(path: Path) -> Iterator[tuple[str, Any]]:
    if path.suffix != ".parquet":
        yield from read_records(path)
        return
    number = 0
    with pq.ParquetFile(path, buffer_size=2**20, pre_buffer=False) as file:
        for batch in file.iter_batches(_BATCH):
            for record in batch.to_pylist():
                yield f"{path}, row {number}", record
                number += 1


def _messages(record: dict[str, Any], names: tuple[str, ...], where: str) -> list[dict[str, str]]:
    prompt = next((record[name] for name in names if record.get(name)), None)
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    texts: list[Any] = prompt if isinstance(prompt, list) else [prompt]
    if not all(isinstance(each, dict) and "content" in each for each in texts):
        expected = f"text or messages in {' or '.join(names)}"
        raise ValueError(f"{where}: expected {expected}, found {describe(prompt)}")
    return [{"role": str(each.get("role", "user")), "content": str(each["content"])} for each in texts]


def _prime_verifier(record: dict[str, Any], where: str) -> dict[str, Any]:
    """The verifier of a row of prime's: math, code by asserts or by stdin, or a judge with a reference."""
    info = _parsed(take(record, "verification_info", object, where), where)
    if not isinstance(info, dict):
        raise ValueError(f"{where}: expected an object in verification_info, found {describe(info)}")
    if "ground_truth" in info:
        return verifier("math", info["ground_truth"])
    calls, stdio = None, None
    try:
        cases = info.get("test_cases") or []
        if "test_case_inputs" in info:
            pairs = zip(info["test_case_inputs"], info["test_case_outputs"], strict=True)
            calls = [_assert(info["fn_name"], given, wanted) for given, wanted in pairs]
        elif info.get("language", "python") == "python":
            kinds = {case["type"] for case in cases}
            if kinds == {"stdin_stdout"}:
                stdio = [{"input": case["input"], "output": case["output"]} for case in cases]
            elif kinds == {"function_call"}:
                calls = [_assert(case["fn_name"], case["input"], case["output"]) for case in cases]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{where}: test cases that can't be read ({error!r}): {describe(info)}") from None
    if calls or stdio:
        return verifier("code", calls) if calls else verifier("code_stdio", stdio)
    if "judging_instructions" in info and record.get("gold_standard_solution"):
        return verifier("general-quality_ref", record["gold_standard_solution"])
    raise ValueError(
        f"{where}: can't be verified: task_type {record.get('task_type')!r}, verification_info "
        f"{describe(info)}; expected ground_truth, Python test cases of one type, or judging_instructions "
        "with a gold solution"
    )


def _assert(function: str, given: Any, wanted: Any) -> str:
    """A test of a call. given: the arguments (a list), as they are or as text; wanted: the value, or it in a
    list of one, as APPS writes it.
    """
    values = []
    for value in (given, wanted):
        try:
            values.append(_parsed(value, ""))
        except ValueError:
            values.append(value)  # plain text is an argument itself
    arguments = values[0] if isinstance(values[0], list) else [values[0]]
    call = f"{function}({', '.join(map(repr, arguments))})"
    if isinstance(values[1], list) and len(values[1]) == 1:
        return f"assert {call} in ({values[1]!r}, {values[1][0]!r})"
    return f"assert {call} == {values[1]!r}"


def _parsed(value: Any, where: str) -> Any:
    """A value, or what a text holds as JSON or as a Python literal."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        try:
            return ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            raise ValueError(f"{where}: neither JSON nor a Python literal: {describe(value)}") from None


if __name__ == "__main__":
    sys.exit(main())
