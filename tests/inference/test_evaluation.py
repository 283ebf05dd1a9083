"""The same greedy answers in process, over a server by token ids, and by messages."""

import json

import pytest
from served import MODEL, NAME

from verl.evaluation.program import main

LENGTHS = [
    "max_turns=2",
    "data.max_start_length=64",
    "data.max_prompt_length=512",
    "data.max_response_length=40",
]
DOCUMENTS = [
    {"id": str(i), "contents": f'"{name}"\n{name} is a town on the river {river}.'}
    for i, (name, river) in enumerate([("Orlen", "Vey"), ("Lake Lelwick", "Ovuwa"), ("Dretham", "Evith")])
]


@pytest.fixture(scope="module")
def benchmark(tmp_path_factory):
    rows = [
        {
            "data_source": "rivers",
            "prompt": [{"role": "user", "content": f"Question: On which river is {name}?\n"}],
            "reward_model": {"style": "rule", "ground_truth": {"target": [river]}},
            "extra_info": {"index": i},
        }
        for i, (name, river) in enumerate(
            [("Orlen", "Vey"), ("Lake Lelwick", "Ovuwa"), ("Dretham", "Evith")] * 4
        )
    ]
    path = tmp_path_factory.mktemp("rows") / "rivers.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_server_gives_the_answers_of_the_model_in_process(
    server, serve_documents, benchmark, tmp_path, capsys
):
    with serve_documents(DOCUMENTS, topk=1) as url:
        common = [
            "--benchmarks",
            str(benchmark),
            *LENGTHS,
            f"retriever.url={url}/retrieve",
            "retriever.topk=1",
        ]
        ways = {
            "in process": ["--model", str(MODEL)],
            "token ids": ["--base_url", f"{server.url}/v1", "--model", NAME, "--tokenizer", str(MODEL)],
            "messages": ["--base_url", f"{server.url}/v1", "--model", NAME],
        }
        told = {}
        for way, flags in ways.items():
            assert main([*flags, "--out", str(tmp_path / way), *common]) == 0
            (file,) = (tmp_path / way).glob("*/rivers/results.jsonl")
            lines = [json.loads(line) for line in file.read_text().splitlines()]
            keys = ("prompt", "completion", "reward", "searches", "finish_reason")
            told[way] = {line["example_id"]: [line[key] for key in keys] for line in lines}
    assert len(told["in process"]) == 12
    assert sum(searches for _, _, _, searches, _ in told["in process"].values()) > 0
    assert told["token ids"] == told["in process"]
    assert told["messages"] == told["in process"]


def test_sampled_rollouts_differ_and_are_the_same_again(serve_documents, benchmark, tmp_path):
    completions = []
    with serve_documents(DOCUMENTS, topk=1) as url:
        for out, more in (("a", []), ("b", ["--concurrency", "5"])):
            flags = ["--model", str(MODEL), "--benchmarks", str(benchmark), "--out", str(tmp_path / out)]
            flags += ["-n", "3", "--rollouts", "4", *more, *LENGTHS, f"retriever.url={url}/retrieve"]
            assert main(flags) == 0
            (file,) = (tmp_path / out).glob("*/rivers/results.jsonl")
            lines = [json.loads(line) for line in file.read_text().splitlines()]
            completions.append({(x["example_id"], x["rollout_idx"]): x["completion"] for x in lines})
    assert len(completions[0]) == 12 and len(set(completions[0].values())) > 6
    assert completions[0] == completions[1]
