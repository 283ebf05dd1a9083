"""Which servers a program asks: by its rows and all of its settings, for each of our programs."""

import json
from pathlib import Path

import pandas as pd
import pytest

from verl.evaluation.program import main as evaluate
from verl.preflight import servers
from verl.preflight.servers import recognise
from verl.synthesis.__main__ import main as synthesize

PROMPT = [{"role": "user", "content": "What is 3 + 4?"}]
SUM = {"prompt": PROMPT, "env_class": "gsm8k", "reward_spec": {"method": "rule", "ground_truth": "7"}}
SEARCH = {"prompt": PROMPT, "reward_model": {"ground_truth": {"target": ["7"]}}}
TESTS = {"name": "code", "label": '["assert f() == 7"]', "weight": 1.0}
CODE = {
    "prompt": PROMPT,
    "env_class": "single_turn",
    "reward_model": {"ground_truth": {"verifiers": [TESTS]}},
}
FORMS = {  # of a row that has a program tested
    "verifiers": CODE,
    "text": {**CODE, "reward_model": {"ground_truth": json.dumps({"verifiers": [TESTS]})}},
    "names": {**CODE, "reward_model": {"verifier": ["math", "code_stdio"], "ground_truth": ["7", "[]"]}},
    "dataset": {"prompt": PROMPT, "env_class": "single_turn", "dataset": ["code"], "ground_truth": ["[]"]},
    "environment": {"prompt": PROMPT, "env_class": "lcb"},
}


@pytest.fixture(autouse=True)
def no_addresses(monkeypatch):
    for name in ("RETRIEVER_URL", "CODE_API_URL"):
        monkeypatch.delenv(name, raising=False)


def write(path: Path, *rows: dict) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pd.DataFrame(rows).to_parquet(path)
    return path


@pytest.fixture
def asks(tmp_path, capsys):
    """Return the lines about a run of verl.trainer.main_ppo on some rows."""

    def asked(*rows: dict, suffix: str = ".jsonl", settings: tuple[str, ...] = ()) -> list[str]:
        file = write(tmp_path / f"rows{suffix}", *rows)
        arguments = [f"data.train_files='{file}'", f"data.val_files='{file}'", *settings]
        assert servers.main(["python", "-m", "verl.trainer.main_ppo", *arguments]) == 0
        program, *lines = capsys.readouterr().out.splitlines()
        assert program == "program rl"
        return lines

    return asked


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("form", FORMS)
def test_a_code_server_is_asked_for_whatever_the_form_in_which_a_row_names_its_tests(asks, form, suffix):
    assert asks(FORMS[form], suffix=suffix) == ["code"]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_rows_of_mathematics_ask_no_server(asks, suffix):
    about_code = {**SUM, "prompt": [{"role": "user", "content": 'the "code" of "name": "code"'}]}
    assert asks(SUM, about_code, suffix=suffix) == []


def test_searches_ask_for_a_server_with_the_corpus_beside_the_rows(asks, tmp_path):
    assert asks(SUM, SEARCH) == ["retrieval"]
    (tmp_path / "corpus.jsonl").touch()
    assert asks(SUM, SEARCH) == [f"retrieval {tmp_path}/corpus.jsonl"]


def test_an_address_in_any_form_of_settings_or_a_plan_asks_for_no_server(asks, tmp_path, monkeypatch):
    file = tmp_path / "mine.yaml"
    file.write_text("retriever: {url: http://c/x}\nverifiers: {code: {api_url: http://c}}\n")
    rows = (SEARCH, CODE)
    assert asks(*rows) == ["retrieval", "code"]
    assert asks(*rows, settings=(f"@{file}",)) == []
    assert asks(*rows, settings=("@", str(file))) == []
    assert asks(*rows, settings=("do_search=false",)) == ["code"]
    assert asks(*rows, settings=("trainer.dry_run=true",)) == []
    monkeypatch.setenv("RETRIEVER_URL", "http://c/x")
    assert asks(*rows) == ["code"]
    monkeypatch.setenv("CODE_API_URL", "http://c")
    assert asks(*rows) == []


def test_rows_that_are_measured_during_training_count(asks, tmp_path):
    file = write(tmp_path / "searches.jsonl", SEARCH)
    assert asks(SUM, settings=(f"trainer.evals=[{{files: '{file}'}}]",)) == ["retrieval"]


def test_supervised_training_asks_no_server_and_a_program_that_is_not_ours_may_search(capsys, tmp_path):
    assert servers.main(["python", "-m", "verl.trainer.fsdp_sft_trainer", "trainer.nnodes=2"]) == 0
    assert capsys.readouterr().out == "program sft\n"
    (tmp_path / "mine.sh").touch()
    assert servers.main(["env", "A=b", "bash", str(tmp_path / "mine.sh")]) == 0
    assert capsys.readouterr().out == "program other\nretrieval\n"


@pytest.mark.parametrize(
    ("command", "kind", "number"),
    [
        ("bash train_ppo.sh --config x.yaml", "rl", 2),
        ("bash /far/train_sft.sh", "sft", 2),
        ("search-r1 evaluate --model x", "evaluation", 2),
        ("torchrun -m verl.trainer.main_ppo a=b", "rl", 3),
        ("python -m verl.synthesis --corpus c", "evaluation", 3),
        ("python -m data_prep.microworld", "other", 3),
    ],
)
def test_a_program_is_recognised_however_it_is_started(command, kind, number):
    assert recognise(command.split()) == (kind, number)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("bash train_grp.sh a=b", "there is no file train_grp.sh in "),
        ("python -m verl.trainer.main_pp", "there is no verl.trainer.main_pp."),
        ("./train.sh", "there is no file ./train.sh."),
        ("", "Found an empty command"),
    ],
)
def test_a_command_that_is_no_program_is_named(capsys, command, said):
    assert servers.main(command.split()) == 2
    assert said in capsys.readouterr().err


def test_an_evaluation_and_a_synthesis_ask_for_what_their_rows_need(capsys, tmp_path):
    searches, sums, code = (
        write(tmp_path / f"{name}.jsonl", row)
        for name, row in {"searches": SEARCH, "sums": SUM, "code": CODE}.items()
    )
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("retriever: {url: http://ended:1/retrieve}\n")
    corpus = tmp_path / "corpus.jsonl"
    corpus.touch()

    def asked(program, *arguments) -> list[str]:
        assert program(["--model", str(run), *map(str, arguments), "--servers"]) == 0
        return capsys.readouterr().out.splitlines()

    assert asked(evaluate, "--benchmarks", sums) == []
    assert asked(evaluate, "--benchmarks", f"{code},{searches}") == [f"retrieval {corpus}", "code"]
    assert asked(evaluate, "--benchmarks", searches, "retriever.url=http://c/x") == []
    assert asked(evaluate, "--benchmarks", searches, "--retriever", "empty") == []
    assert asked(synthesize, "--benchmarks", code) == ["code"]
    assert asked(synthesize, "--corpus", corpus, "-n", 5) == [f"retrieval {corpus}"]
