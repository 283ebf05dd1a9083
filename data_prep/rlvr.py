"""Rows with verifiable rewards, as others publish them, converted to rows of this project.

    python -m data_prep.rlvr --format open-instruct --input data.jsonl --out rows.parquet
    python -m data_prep.rlvr --format prime --input data.parquet --check      gold answers, by their verifiers

    open-instruct  messages, ground_truth, dataset (a verifier, or a list of them), tools
    prime          prompt, task_type, verification_info (JSON or a Python literal), gold_standard_solution
    verifiers      prompt or question, answer, info (an object or JSON)            with --verifier
    trl            prompt, and solution, answer or ground_truth                    with --verifier

    -> prompt, data_source, reward_model.ground_truth.verifiers [{name, label, weight}],
       extra_info {index, split, info}; labels and info are text, JSON where they are more

--check passes each row's gold answer to its verifiers: the solution that the row brings, or else its label in
the form that the verifier reads. The exit status is 0; 1 if an answer is refused; 2 for a mistake of the
user.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.files import PARQUET_ROWS, describe, read_records, run_command
from verl.config import load_config
from verl.data.mixture import verifier_entry
from verl.utils.text import printable
from verl.verifiers.registry import Assigned, Verifiers, assigned_verifiers, check_name
from verl.verifiers.text import as_labels
from verl.verifiers.verifier import Sample, VerifierSettings, parse_literal

FORMATS = {  # the columns of the prompt, and those of the answer of rows that get --verifier
    "open-instruct": (("messages",), ()),
    "prime": (("prompt",), ()),
    "verifiers": (("prompt", "question"), ("answer",)),
    "trl": (("prompt",), ("solution", "answer", "ground_truth")),
}
# How an answer is written for a verifier. Verifiers whose label is no answer are left out.
_GOLD_TEMPLATES = {
    "gsm8k": "The answer is {}",
    "flan": "The answer is: {}",
    **dict.fromkeys(("math", "strict_math"), "\\boxed{{{}}}"),
    **dict.fromkeys(("string_matcher", "string_f1", "puzzle"), "<answer>{}</answer>"),
    **dict.fromkeys(("re_search", "re_search_f1"), "<finish>{}</finish>"),
}
_VERIFIER = pa.struct({"name": pa.string(), "label": pa.string(), "weight": pa.float64()})
_SCHEMA = pa.schema(
    {
        "prompt": pa.list_(pa.struct({"role": pa.string(), "content": pa.string()})),
        "data_source": pa.string(),
        "reward_model": pa.struct(
            {"style": pa.string(), "ground_truth": pa.struct({"verifiers": pa.list_(_VERIFIER)})}
        ),
        "extra_info": pa.struct({"index": pa.int64(), "split": pa.string(), "info": pa.string()}),
    }
)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Rows with verifiable rewards as rows of ours.")
    parser.add_argument("--format", choices=FORMATS, required=True)
    parser.add_argument("--input", type=Path, required=True, help="a .parquet, .jsonl or .json file")
    parser.add_argument("--out", type=Path, help="the parquet file to write; not needed with --check")
    parser.add_argument("--verifier", default="math", help="of rows of verifiers and trl (math)")
    parser.add_argument("--name", help="data_source of the rows; default: the input's name")
    parser.add_argument("--check", action="store_true", help="verify each gold answer")
    return run_command(parser, convert, argv)


def convert(options: argparse.Namespace) -> int:
    """Write the rows and check their gold answers, some thousand at a time; return the exit status.

    Raises ValueError for a bad row, or if there is nothing to do.
    """
    if options.out is None and not options.check:
        raise ValueError("found neither --out nor --check; expected --out FILE.parquet, or --check")
    rows = read_rows(options)
    num_rows = 0
    writer = None
    tally = {"refused": 0, "could not be verified": 0, "without answer": 0}
    with ExitStack() as stack:
        verifiers = Verifiers(VerifierSettings(load_config([]).verifiers))
        stack.callback(verifiers.close)
        if options.out:
            partial = options.out.with_name(f".{options.out.name}.partial")
            stack.callback(partial.unlink, missing_ok=True)
            writer = stack.enter_context(pq.ParquetWriter(partial, _SCHEMA))
        while batch := list(islice(rows, PARQUET_ROWS)):
            num_rows += len(batch)
            if writer:
                writer.write_table(pa.Table.from_pylist([row for _, row, _ in batch], _SCHEMA))
            requests = []
            for where, row, solution in batch if options.check else ():
                num_before = len(requests)
                query = "\n".join(message["content"] for message in row["prompt"])
                for entry in row["reward_model"]["ground_truth"]["verifiers"]:
                    name = entry["name"]
                    label = entry["label"]
                    gold = solution
                    if gold is None and name in _GOLD_TEMPLATES:
                        gold = _GOLD_TEMPLATES[name].format((as_labels(label) or [label])[0])
                    if gold is not None:
                        requests.append((where, Sample(gold, label, query), Assigned(name, label)))
                tally["without answer"] += len(requests) == num_before
            results = verifiers.verify([(sample, [assigned]) for _, sample, assigned in requests])
            for (where, _, assigned), result in zip(requests, results, strict=True):
                if result.score is None or result.score < 1:
                    outcome = "refused" if result.score is not None else "could not be verified"
                    tally[outcome] += 1
                    details = f"{assigned.label[:80]} {result.verdicts[0]['detail']}"
                    line = f"{where}: {outcome} by {assigned.name} (score {result.score}): {details}"
                    print(printable(line))
        if num_rows == 0:
            raise ValueError(f"{options.input}: found no rows")
        if writer:
            writer.close()
            partial.replace(options.out)
            print(f"{options.out}: {num_rows:,} rows")
    if options.check:
        print(f"{num_rows:,} rows: " + ", ".join(f"{count:,} {outcome}" for outcome, count in tally.items()))
    return int(tally["refused"] > 0)


def read_rows(options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any], str | None]]:
    """Yield the place, the converted row and the solution that it brings, of each row of the input.

    Raises ValueError for a bad row.
    """
    check_name(options.verifier)
    for index, (where, record) in enumerate(read_records(options.input)):
        try:
            messages, solution, entries, info = _read(record, options)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        row = {
            "prompt": messages,
            "data_source": options.name or options.input.stem,
            "reward_model": {"style": "rule", "ground_truth": {"verifiers": entries}},
            "extra_info": {
                "index": index,
                "split": "train",
                "info": None if info is None else json.dumps(info, ensure_ascii=False, default=str),
            },
        }
        yield where, row, solution or None


def _read(record: Any, options: argparse.Namespace) -> tuple[list[Any], str | None, list[Any], Any]:
    """Return messages, solution, verifiers and info of a record."""
    if not isinstance(record, dict):
        raise ValueError(f"expected an object, found {describe(record)}")
    prompts, answers = FORMATS[options.format]
    prompt = next((record[name] for name in prompts if record.get(name)), None)
    content = [{"content": prompt}] if isinstance(prompt, str) else prompt
    if not isinstance(content, list) or not all(
        isinstance(message, dict) and "content" in message for message in content
    ):
        raise ValueError(f"expected text or messages in {' or '.join(prompts)}, found {describe(prompt)}")
    messages = [
        {"role": str(message.get("role", "user")), "content": str(message["content"])} for message in content
    ]
    if options.format == "open-instruct":
        is_solved = len(messages) > 1 and messages[-1]["role"] == "assistant"
        solution = messages.pop()["content"] if is_solved else None
        spec = {"verifier": record.get("dataset"), "ground_truth": record.get("ground_truth")}
        entries = [verifier_entry(assigned.name, assigned.label) for assigned in assigned_verifiers(spec)]
        if not entries:
            raise ValueError(f"no verifier in 'dataset'; its keys are {sorted(record)}")
        tools = record.get("tools")
        return messages, solution, entries, None if tools is None else {"tools": tools}
    if options.format == "prime":
        info = {"task_type": record.get("task_type")}
        solution = record.get("gold_standard_solution")
        return messages, solution, [_prime_verifier(record)], info
    answer_values = [record[column] for column in answers if record.get(column) is not None]
    if not answer_values:
        raise ValueError(f"no {' or '.join(answers)}; its keys are {sorted(record)}")
    info = parse_literal(record.get("info"))
    return messages, None, [verifier_entry(options.verifier, answer_values[0])], info


def _prime_verifier(record: dict[str, Any]) -> dict[str, Any]:
    """Return the verifier of a row of prime's.

    It is math, code by asserts or by stdin, or a judge with a reference. Raises ValueError if the row can't
    be verified.
    """
    info = parse_literal(record.get("verification_info"))
    if not isinstance(info, dict):
        raise ValueError(f"expected an object in verification_info, found {describe(info)}")
    if "ground_truth" in info:
        return verifier_entry("math", info["ground_truth"])
    calls = None
    stdio = None
    try:
        cases = info.get("test_cases") or []
        if "test_case_inputs" in info:
            pairs = zip(info["test_case_inputs"], info["test_case_outputs"], strict=True)
            calls = [_assert_line(info["fn_name"], arguments, result) for arguments, result in pairs]
        elif info.get("language", "python") == "python":
            kinds = {case["type"] for case in cases}
            if kinds == {"stdin_stdout"}:
                stdio = [{"input": case["input"], "output": case["output"]} for case in cases]
            elif kinds == {"function_call"}:
                calls = [_assert_line(case["fn_name"], case["input"], case["output"]) for case in cases]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"test cases that can't be read ({error!r}): {describe(info)}") from None
    if calls or stdio:
        return verifier_entry("code", calls) if calls else verifier_entry("code_stdio", stdio)
    if "judging_instructions" in info and record.get("gold_standard_solution"):
        return verifier_entry("general-quality_ref", record["gold_standard_solution"])
    raise ValueError(
        f"can't be verified: task_type {record.get('task_type')!r}, verification_info "
        f"{describe(info)}; expected ground_truth, Python test cases of one type, or judging_instructions "
        "with a gold solution"
    )


def _assert_line(function: str, arguments: Any, expected: Any) -> str:
    """Return a test of a call.

    `arguments` is the list of arguments, as it is or as text. `expected` is the value, or a list with the
    value in it, as APPS writes it.
    """
    values = []
    for value in (arguments, expected):
        try:
            values.append(parse_literal(value))
        except ValueError:
            values.append(value)  # plain text is itself an argument
    argument_list = values[0] if isinstance(values[0], list) else [values[0]]
    call = f"{function}({', '.join(map(repr, argument_list))})"
    if isinstance(values[1], list) and len(values[1]) == 1:
        return f"assert {call} in ({values[1]!r}, {values[1][0]!r})"
    return f"assert {call} == {values[1]!r}"


if __name__ == "__main__":
    sys.exit(main())
