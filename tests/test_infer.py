"""infer.py: a user's mistakes are one line; a model that has learnt to search is shown searching."""

from __future__ import annotations

import fcntl
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    MambaConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import infer
from data_prep.prompts import SEARCH_PROMPT
from search_r1.llm_agent.generation import LLMGenerationManager, format_observation
from search_r1.search.client import SearchClient
from verl.agent.loop import LoopEvent

REPO = Path(__file__).parents[1]
DOCUMENTS = [
    {"contents": '"Orlen"\nOrlen is a town on the Vey.'},
    {"contents": '"Vey"\nThe Vey is a river.'},
]
QUESTION = "What is Orlen?"
SEARCH = "<search> Orlen </search>"
ANSWER = "<answer> a town </answer>"


@pytest.fixture(scope="module")
def url(serve_documents) -> Iterator[str]:
    with serve_documents(DOCUMENTS, topk=1) as address:
        yield f"{address}/retrieve"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    """A run folder with one checkpoint: a tiny model, trained until it knows one trajectory by heart."""
    torch.manual_seed(0)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")

    found = [{"contents": DOCUMENTS[0]["contents"], "score": 0.0}]
    text = f"Q: {QUESTION}\n{SEARCH}{format_observation(found)}{ANSWER}"
    ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(300):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if loss < 0.02:
            break
    assert loss < 0.05

    run_dir = tmp_path_factory.mktemp("work") / "verl_checkpoints" / "my-run"
    folder = run_dir / "global_step_7" / "actor" / "huggingface"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "prompt_template.txt").write_text("Q: {question}\n")
    lengths = {
        "max_start_length": 60,
        "max_prompt_length": 400,
        "max_response_length": 40,
        "max_obs_length": 150,
    }
    (run_dir / "config.yaml").write_text(
        yaml.safe_dump({"max_turns": 2, "retriever": {"topk": 1}, "data": lengths})
    )
    return run_dir


def test_the_search_server_is_the_runs_only_while_it_trains(tmp_path, monkeypatch):
    monkeypatch.delenv("RETRIEVER_URL", raising=False)
    model = tmp_path / "run" / "global_step_1" / "actor" / "huggingface"
    model.mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text("retriever: {url: [http://a:1/retrieve, http://b:2]}\n")
    assert infer.find_search_server(str(model)) == "http://127.0.0.1:8000/retrieve"
    with (tmp_path / "run" / "run.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert infer.find_search_server(str(model)) == "http://a:1/retrieve,http://b:2"
    assert infer.find_search_server("Qwen/Qwen2.5-3B-Instruct") == "http://127.0.0.1:8000/retrieve"


def ask(monkeypatch, *flags: str) -> int:
    monkeypatch.setattr(sys, "argv", ["infer.py", *flags])
    return infer.main()


def test_a_trained_model_is_shown_searching_and_answers(run_dir, url, monkeypatch, capsys):
    monkeypatch.chdir(run_dir.parents[1])  # no --model: the newest checkpoint of a local run
    monkeypatch.setenv("RETRIEVER_URL", url)
    assert ask(monkeypatch, "--question", "What is Orlen") == 0
    shown, told = capsys.readouterr()
    assert "note: asks verl_checkpoints/my-run/global_step_7/actor/huggingface, the newest model of" in told
    assert SEARCH in shown and ANSWER in shown
    assert 'Doc 1 "Orlen"' in shown and "Orlen is a town on the Vey." in shown
    assert "Answer: a town" in shown and "(1 searches)" in shown
    assert shown.index(SEARCH) < shown.index("Doc 1") < shown.index(ANSWER)


def test_a_line_says_where_the_settings_are_from(run_dir, url, monkeypatch, capsys):
    flags = ["--question", "What is Orlen", "--retriever-url", url, "--model", str(run_dir), "--topk", "2"]
    assert ask(monkeypatch, *flags) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("settings: max_turns=2 topk=2 max_start_length=60 ")
    assert line.endswith(f"(from {run_dir}/config.yaml, but for topk)")


def test_questions_can_be_piped_in(run_dir, url, monkeypatch, capsys):
    """A blank line ends nothing, and each question is shown above its answer."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{QUESTION}\n\n  \n{QUESTION}\n"))
    assert ask(monkeypatch, "--model", str(run_dir), "--retriever-url", url) == 0
    shown = capsys.readouterr().out
    assert shown.count("Answer: a town") == shown.count(f"? {QUESTION}") == 2
    assert shown.index(f"? {QUESTION}") < shown.index(SEARCH) < shown.rindex(f"? {QUESTION}")


def test_a_file_of_questions_gives_one_json_object_each_and_nothing_else(
    run_dir, url, tmp_path, monkeypatch, capsys
):
    (tmp_path / "questions.txt").write_text(f"{QUESTION}\n\n{QUESTION.rstrip('?')}\n")
    flags = [
        "--model",
        str(run_dir),
        "--retriever-url",
        url,
        "--input",
        str(tmp_path / "questions.txt"),
        "--json",
    ]
    assert ask(monkeypatch, *flags) == 0
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [result["question"] for result in results] == [QUESTION, QUESTION]
    for result in results:
        assert (result["answer"], result["finish_reason"], result["num_searches"]) == ("a town", "answer", 1)
        assert SEARCH in result["turns"][0]["text"]


def test_a_failing_search_of_a_piped_question_is_status_1(run_dir, url, monkeypatch):
    answers = iter([True, False, True])
    monkeypatch.setattr(infer, "load_manager", lambda *_: io.StringIO())
    monkeypatch.setattr(infer, "ask", lambda *_: next(answers))
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\nb\nc\n"))
    assert ask(monkeypatch, "--model", str(run_dir), "--retriever-url", url) == 1
    assert list(answers) == []


def test_a_model_that_the_native_engine_does_not_run_is_refused(run_dir, url, tmp_path, monkeypatch, capsys):
    MambaConfig(vocab_size=257, hidden_size=8, num_hidden_layers=1, state_size=2).save_pretrained(tmp_path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(infer.find_model(str(run_dir))) / file, tmp_path)
    assert ask(monkeypatch, "--question", "x", "--model", str(tmp_path), "--retriever-url", url) != 0
    error = capsys.readouterr().err
    assert "'mamba'" in error and "vLLM" in error


def load(model: Path | str, *flags: str, console: Console | None = None) -> LLMGenerationManager:
    arguments = infer.build_parser().parse_args(["--retriever-url", "http://127.0.0.1:8000", *flags])
    settings, _ = infer.find_settings(str(model), None, None)
    return infer.load_manager(str(model), settings, arguments, console or Console())


def test_the_ids_of_the_models_generation_config_end_a_turn_too(run_dir, tmp_path):
    folder = shutil.copytree(infer.find_model(str(run_dir)), tmp_path / "model")
    GenerationConfig(eos_token_id=[0, 256]).save_pretrained(folder)
    with closing(load(folder)) as manager:
        assert manager.codec.eos_token_ids == {0, 256}
    (folder / "generation_config.json").unlink()
    with closing(load(folder)) as manager:
        assert manager.codec.eos_token_ids == {256}


def test_a_failing_search_is_one_line_and_status_1(run_dir, monkeypatch, capsys):
    monkeypatch.setattr(SearchClient.__init__, "__defaults__", (3, 0.3, 0))
    flags = ["--retriever-url", "http://127.0.0.1:1"]
    console = Console(file=io.StringIO())
    with closing(load(infer.find_model(str(run_dir)), *flags, console=console)) as manager:
        arguments = infer.build_parser().parse_args(flags)
        assert infer.ask(manager, "Q: {question}\n", QUESTION, arguments, console) is False
    error = capsys.readouterr().err
    assert error.startswith("error: the search failed: no connection within 0.3 s") and error.count("\n") == 1


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--question", "  "], "the question is empty"),
        (["--question", "x", "--input", "y"], "--question and --input: give one of them"),
        (["--input", "{tmp}/none.txt"], "--input: {tmp}/none.txt can't be read"),
        (["--question", "x", "--model", "/nowhere/model"], "there is no folder /nowhere/model"),
        (["--question", "x", "--model", "{tmp}"], "holds no config.json"),
        (["--question", "x"], "make one with `bash train_grpo.sh`"),
        (["--question", "x", "--model", "{model}", "--template", "{tmp}/none"], "--template: "),
        (["--question", "x", "--model", "{model}", "--template", "{tmp}/bad.txt"], "no {question} in it"),
        (["--question", "x", "--model", "{model}", "--topk", "0"], "--topk: found 0"),
        (["--question", "x", "--model", "{model}", "--max-turns", "-1"], "--max-turns: found -1"),
        (["--question", "x", "--model", "{model}", "--temperature", "-1"], "--temperature: found -1"),
        (
            ["--question", "x", "--model", "{model}", "--retriever-url", "nohost"],
            "retriever url: found 'nohost'",
        ),
    ],
)
def test_a_mistake_is_one_line_and_status_2(run_dir, tmp_path, monkeypatch, capsys, flags, message):
    (tmp_path / "bad.txt").write_text("no place")
    monkeypatch.chdir(tmp_path)
    model = infer.find_model(str(run_dir))
    words = [flag.format(tmp=tmp_path, model=model) if "{" in flag else flag for flag in flags]
    assert ask(monkeypatch, *words) == 2
    message = message.replace("{tmp}", str(tmp_path))
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and message in captured.err and captured.err.count("\n") == 1
    assert captured.out == ""


def test_a_cut_weights_file_is_one_line(run_dir, url, tmp_path, monkeypatch, capsys):
    folder = shutil.copytree(infer.find_model(str(run_dir)), tmp_path / "cut")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert ask(monkeypatch, "--question", "x", "--model", str(folder), "--retriever-url", url) == 2
    error = capsys.readouterr().err
    assert "can't be loaded" in error and error.count("\n") == 1


def test_files_without_a_tensor_of_the_model_are_refused(run_dir, tmp_path):
    folder = shutil.copytree(infer.find_model(str(run_dir)), tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="lack 1 of its tensors, the first: model.norm.weight"):
        load(folder)


@pytest.mark.slow  # it is asked for five seconds
def test_a_dead_retriever_is_one_line_before_anything_is_loaded(run_dir):
    command = [sys.executable, "infer.py", "--question", "x", "--model", str(run_dir)]
    begin = time.monotonic()
    process = subprocess.run(
        [*command, "--retriever-url", "http://127.0.0.1:1"],
        capture_output=True,
        text=True,
        cwd=REPO,
        env={**os.environ, "PYTHONPROFILEIMPORTTIME": "1"},
        timeout=60,
    )
    errors = [line for line in process.stderr.splitlines() if not line.startswith("import time:")]
    assert process.returncode == 2
    assert len(errors) == 1 and errors[0].startswith("error: the search server does not answer")
    assert "retrieval_launch.sh" in errors[0]
    assert not any(line.split("|")[-1].strip() == "torch" for line in process.stderr.splitlines())
    assert time.monotonic() - begin < 30


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://127.0.0.1:1", "Start one with `bash retrieval_launch.sh`"),
        ("http://192.0.2.7:8000,http://localhost:1", "Start one with `bash retrieval_launch.sh`"),
        ("http://192.0.2.7:8000/retrieve", "Start one with `bash retrieval_launch.sh` on 192.0.2.7"),
    ],
)
def test_a_server_of_another_host_is_to_be_started_there(url, said):
    assert infer.how_to_start(url.split(",")) == said


def test_no_question_on_an_empty_input_is_a_mistake(run_dir, url, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert ask(monkeypatch, "--model", str(run_dir), "--retriever-url", url) == 2
    assert "no question" in capsys.readouterr().err


def test_the_newest_finished_checkpoint_is_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = [
        "verl_checkpoints/a/global_step_90",
        "checkpoints/p/b/global_step_3",
        "verl_checkpoints/a/global_step_100",
    ]
    names += ["verl_checkpoints/a/global_step_110.incomplete", "verl_checkpoints/a/global_step_120"]
    for age, name in enumerate(names):
        folder = Path(name) / ("critic" if name.endswith("120") else "actor") / "huggingface"
        folder.mkdir(parents=True)
        (folder / "config.json").touch()
        os.utime(folder / "config.json", (1000 + age, 1000 + age))
    assert infer.find_model(None) == "verl_checkpoints/a/global_step_100/actor/huggingface"
    assert infer.find_model("checkpoints") == "checkpoints/p/b/global_step_3/actor/huggingface"
    step = "verl_checkpoints/a/global_step_90"
    assert infer.find_model(step) == f"{step}/actor/huggingface"


def test_the_runs_settings_hold_unless_a_flag_says_otherwise(run_dir, tmp_path):
    model = infer.find_model(str(run_dir))
    names = list(infer.DEFAULT_SETTINGS)
    of_run = dict(zip(names, (2, 1, 60, 400, 40, 150), strict=True))
    assert infer.find_settings(model, None, None)[0] == of_run
    assert infer.find_settings(model, 0, 5)[0] == of_run | {"max_turns": 0, "topk": 5}
    settings, line = infer.find_settings(str(tmp_path), None, None)
    assert settings == infer.DEFAULT_SETTINGS and "max_turns=4 topk=3" in line
    assert "defaults and flags, as no config.yaml of a run was found" in line


def test_a_converted_models_settings_are_those_beside_it(run_dir, tmp_path):
    shutil.copy(run_dir / "config.yaml", tmp_path)
    settings, line = infer.find_settings(str(tmp_path), None, None)
    assert settings["max_obs_length"] == 150 and line.endswith(f"(from {tmp_path}/config.yaml)")
    (tmp_path / "config.yaml").write_text("model: {partial_pretrain: x}")  # a supervised run
    assert infer.find_settings(str(tmp_path), None, None)[0] == infer.DEFAULT_SETTINGS


@pytest.mark.parametrize(
    ("text", "problem"), [("", "holds None"), ("- a list", "holds ['a list']"), ("a: [", "can't be read")]
)
def test_a_config_that_no_run_wrote_is_an_error_that_names_it(tmp_path, text, problem):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(
        ValueError, match=f"config.yaml {re.escape(problem)}.*expected the config.yaml of a run"
    ):
        infer.find_settings(str(tmp_path), None, None)


def test_the_template_is_the_flags_else_the_models_else_the_general_one(run_dir, tmp_path):
    mine = tmp_path / "mine.txt"
    mine.write_text("Mine: {question}")
    model = infer.find_model(str(run_dir))
    assert infer.find_template(mine, model) == "Mine: {question}"
    assert infer.find_template(None, model) == "Q: {question}\n"
    assert infer.find_template(None, str(tmp_path)) == SEARCH_PROMPT


def test_the_screen_colours_tags_that_arrive_in_pieces():
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=80)
    screen = infer.Screen(console)
    text = "a < b <think>so</think> <search>Orlen</search>"
    for char in text:
        screen.show(LoopEvent("text", 0, char))
    found = {"documents": [{"contents": '"T"\n' + "word " * 99, "score": None}]}
    screen.show(LoopEvent("observation", 0, "", found))
    screen.show(LoopEvent("observation", 0, "", {"documents": None}))
    screen.show(LoopEvent("end", 0, "answer"))
    output = console.file.getvalue()
    assert "\x1b[36m<search>" in output and "\x1b[90m<think>" in output
    stripped = re.sub(r"\x1b\[[\d;]*m", "", output)
    assert stripped.startswith(text)
    assert "Doc 1" in stripped and "no action" in stripped and stripped.count("word") < 40
