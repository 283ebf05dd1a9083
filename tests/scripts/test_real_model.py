"""scripts/real_model.sh, from files of questions to its page: with a tiny random Gemma, and a kill."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from random_gemma import write_random_gemma

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from scripts.real_model_report import LABELS, MODELS, compare, mean_with_interval, read_results  # noqa: E402

SOURCE_FILES = ["xquad.en.json", "2wikimultihopqa_corpus.json", "hotpot_dev_v1_simplified.json"]
TOWNS = ["Arlen", "Bora", "Cale", "Doria", "Elm", "Fenna", "Gorm", "Hale", "Ilse", "Jorn", "Kade", "Lira"]
# two steps of two questions; a start that is long enough for the form of a search
SETTINGS = [
    "sft.data.val_files=null",
    "sft.trainer.total_training_steps=60",
    "sft.trainer.total_epochs=60",
    "sft.optim.lr=1e-2",
]
SETTINGS += ["grpo.data.train_batch_size=2", "grpo.actor_rollout_ref.rollout.n_agent=2"]
SETTINGS += ["grpo.actor_rollout_ref.actor.ppo_mini_batch_size=4", "grpo.trainer.total_training_steps=2"]
SETTINGS += ["sft.data.train_batch_size=8", "grpo.trainer.save_freq=1", "test.data.val_data_num=5"]
SETTINGS += [f"{kind}.trainer.n_gpus_per_node=1" for kind in ("sft", "grpo")]


def write_sources(folder: Path) -> None:
    """Towns with three questions each, other passages, and questions of two hops over these."""
    rng = random.Random(0)
    articles = []
    for number, town in enumerate(TOWNS):
        founder = rng.choice(TOWNS) + " Ost"
        river = rng.choice(TOWNS)
        year = str(1800 + number)
        text = f"The town {town} was founded by {founder}. {town} lies on the river {river}. It is of {year}."
        asked = {f"Who founded {town}?": founder, f"On which river lies {town}?": river}
        asked[f"Of which year is {town}?"] = year
        qas = [{"id": q, "question": q, "answers": [{"text": a}]} for q, a in asked.items()]
        articles.append({"title": town, "paragraphs": [{"context": text, "qas": qas}]})
    films = [
        {"title": f"{town} Night", "text": f"{town} Night is a film directed by {town} Sund."}
        for town in TOWNS
    ]
    people = [
        {"title": f"{town} Sund", "text": f"{town} Sund (born 1950) is of {town}burg."} for town in TOWNS
    ]
    hops = [
        {"question": f"Of where is the director of {town} Night?", "answer": f"{town}burg", "type": "bridge"}
        for town in TOWNS
    ]
    files = {"xquad.en": {"data": articles}, "2wikimultihopqa_corpus": films + people}
    folder.mkdir()
    for name, content in (files | {"hotpot_dev_v1_simplified": hops}).items():
        (folder / f"{name}.json").write_text(json.dumps(content))


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A place of its own for what the script makes, with links to the repository's files."""
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    for name in ("verl", "search_r1", "data_prep", "scripts", "configs", "train_sft.sh", "train_grpo.sh"):
        (checkout / name).symlink_to(ROOT / name)
    write_sources(tmp_path / "sources")
    return checkout


def start(checkout: Path, *flags: str, **variables: str) -> subprocess.Popen[str]:
    known = {"SOURCES": "../sources", "MODEL": "../model", "NAME": "run", "NUM_VAL": "4"}
    environment = {name: value for name, value in os.environ.items() if name not in ("RETRIEVER_URL", "SEED")}
    environment |= {"VIRTUAL_ENV": sys.prefix, **known, **variables}  # this Python: nothing is installed
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    command = ["bash", "scripts/real_model.sh", *flags]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, cwd=checkout, env=environment, text=True, **pipes)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # three minutes where nothing else runs
def test_a_real_model_is_trained_asked_and_shown_also_after_a_kill(checkout, tmp_path):
    write_random_gemma(tmp_path / "model")
    run = checkout / "verl_checkpoints" / "run"
    first = start(checkout, *SETTINGS)
    deadline = time.monotonic() + 900
    while not (run / "grpo" / "global_step_1").exists():
        assert time.monotonic() < deadline and first.poll() is None, first.communicate()[0]
        time.sleep(0.05)
    family = psutil.Process(first.pid).children(recursive=True)
    first.kill()
    first.communicate(timeout=60)
    assert psutil.wait_procs(family, timeout=60)[1] == []  # nothing goes on without it
    second = start(checkout, *SETTINGS)
    said = second.communicate(timeout=900)[0]
    assert second.returncode == 0, said
    stages = re.findall(r"==== (\w+): (is there|begins)", said)
    done = ["rows", "vocabulary", "few_shot_test", "sft", "sft_test"]
    rest = ["grpo", "grpo_test", "no_search"]
    assert stages == [(name, "is there") for name in done] + [(name, "begins") for name in rest]
    assert re.search(r"resumed from .*global_step_[12]", said)

    results = json.loads((run / "results.json").read_text())
    assert list(results["results"]) == ["squad", "hotpotqa", "films"]
    assert len(results["results"]["films"]["sampled"]["grpo_test"]["em"]) == 3
    of_greedy = results["results"]["squad"]["greedy"]
    for mode, of_models in results["results"]["squad"].items():
        assert list(of_models) == list(LABELS if mode == "greedy" else MODELS)
        for each in of_models.values():
            assert each["questions"] >= 5 and each["em"][1] <= each["em"][0] <= each["em"][2]
            assert each["f1"][0] >= each["em"][0]
        assert of_models["few_shot_test"]["searches"] == 0 and of_models["sft_test"]["searches"] >= 1
    assert of_greedy["no_search"]["searches"] == 0 and of_greedy["val/empty"]["searches"] >= 1
    assert of_greedy["val/empty"]["documents_hold_answer"] == 0
    assert set(results["seconds"]) == {*done, *rest} and "supervised start" in said
    page = (run / "results.html").read_text()
    assert [page.count(f'"model": "{label}"') for label in MODELS.values()] == [5, 5, 5]
    assert "data:image/png;base64," in page
    assert (run / "trained" / "prompt_template.txt").read_text().endswith("Question: {question}\n")


def test_mistakes_are_said_before_anything_is_made(checkout, tmp_path):
    def refused(*flags: str, **variables: str) -> str:
        process = start(checkout, *flags, **variables)
        said = process.communicate(timeout=60)[0]
        assert process.returncode == 2
        return said

    assert "expected --short, sft.KEY=VALUE" in refused("trainer.seed=1")
    (tmp_path / "other").mkdir()
    said = refused(SOURCES="../other")
    lines = [shlex.split(line) for line in said.splitlines() if line.startswith("curl ")]
    assert [line[-2] for line in lines] == [f"{tmp_path}/other/{name}" for name in SOURCE_FILES]
    page = (ROOT / "docs" / "real_model.md").read_text()
    for line, name in zip(lines, SOURCE_FILES, strict=True):
        assert line[-1].startswith("https://") and line[-1].endswith(f"/{name}") and line[-1] in page
    (tmp_path / "other" / SOURCE_FILES[0]).touch()
    assert refused(SOURCES="../other").count("curl ") == 2
    assert not (checkout / "verl_checkpoints").exists() and not (checkout / "data").exists()
    made = checkout / "verl_checkpoints" / "run"
    made.mkdir(parents=True)
    (made / "settings.txt").write_text("SEED=5\n")
    assert "holds results with other settings" in refused()


def test_an_interval_holds_the_mean_and_a_difference_goes_by_question():
    values = np.array([0.0, 1.0] * 100)
    mean, low, high = mean_with_interval(values)
    assert mean == 0.5 and 0.42 < low < 0.44 and 0.56 < high < 0.58
    old = {f"q{i}": {"em": value, "f1": 0.5, "searches": 1} for i, value in enumerate(values)}
    old = {name: line | {"documents_hold_answer": 1.0} for name, line in old.items()}
    new = {name: line | {"em": max(line["em"], float(name < "q2"))} for name, line in old.items()}
    figures = compare(new, {name: old[name] for name in list(old)[:150]})
    assert (figures["questions"], figures["searches"], figures["f1_change"]) == (200, 1.0, [0.0, 0.0, 0.0])
    mean, low, high = figures["em_change"]
    assert mean == pytest.approx(sum(new[q]["em"] - old[q]["em"] for q in list(old)[:150]) / 150)
    assert 0 < low < mean < high


def test_the_controls_are_read_from_the_test_that_asked_them(tmp_path):
    folder = tmp_path / "grpo_test"
    folder.mkdir()
    (folder / "summary.json").write_text("{}")
    line = {"question": "Who?", "data_source": "squad", "em": 1.0, "f1": 1.0, "searches": 1}
    (folder / "validation.jsonl").write_text(json.dumps(line | {"mode": "greedy", "questions": "val"}) + "\n")
    controls = [line | {"eval": name, "em": 0.0} for name in ("val/shuffled", "val/empty")]
    (folder / "evaluations.jsonl").write_text("".join(json.dumps(control) + "\n" for control in controls))
    of_greedy = read_results(tmp_path)["squad"]["greedy"]
    assert {run: lines["Who? (1)"]["em"] for run, lines in of_greedy.items()} == {
        "grpo_test": 1.0,
        "val/shuffled": 0.0,
        "val/empty": 0.0,
    }
    assert set(of_greedy) <= set(LABELS)
