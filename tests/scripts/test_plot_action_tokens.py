"""scripts/plot_action_tokens.py: the change of log p(</search>) in an update, from a run's files."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl.utils.json_files import read_lines, write_lines

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from scripts import plot_action_tokens  # noqa: E402

BASE_MODEL = ROOT / "data_prep" / "base_model"
TEMPERATURE = 1.1
PROMPT = "Question: Who directed Distant Horizon?\n"
TURNS = ("<search> Distant Horizon</search>", "<search> Zokis Zirkey</search>")


def trained_copy(folder: Path, tokenizer) -> None:
    """Save the base model with one row of its output matrix halved: that of the closing tag."""
    model = AutoModelForCausalLM.from_pretrained(BASE_MODEL, dtype=torch.float32)
    (closing,) = tokenizer.encode("</search>", add_special_tokens=False)
    output = torch.nn.Parameter(model.get_output_embeddings().weight.detach().clone())
    output.data[closing] *= 0.5
    model.config.tie_word_embeddings = False
    model.get_output_embeddings().weight = output
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Return the folder of a run of one step: a trajectory of two queries, and one of a single query."""
    run = tmp_path_factory.mktemp("run")
    tokenizer = AutoTokenizer.from_pretrained(BASE_MODEL)
    settings = {"model": {"path": str(BASE_MODEL)}, "rollout": {"temperature": TEMPERATURE}}
    (run / "config.yaml").write_text(yaml.safe_dump({"actor_rollout_ref": settings}), encoding="utf-8")
    trained_copy(run / "global_step_1" / "actor" / "huggingface", tokenizer)
    (run / "trajectories").mkdir()
    rows = []
    for texts in (TURNS, TURNS[:1]):
        tokens: list[str] = []
        turns = []
        for text in texts:
            ids = tokenizer.encode(text, add_special_tokens=False)
            start = len(tokens)
            tokens += [tokenizer.decode([token]) for token in ids]
            turns.append({"action": "search", "text": text, "start": start, "end": len(tokens)})
        trajectory = {"turns": turns, "prompt_text": PROMPT}
        row = {"split": "train", "extra_info": {"hops": 2}, "tokens": tokens, "trajectory": trajectory}
        rows.append(row)
    rows.append({**rows[0], "split": "val"})
    rows.append({**rows[0], "extra_info": {"hops": 1}})
    write_lines(run / "trajectories" / "step_1.jsonl", rows)
    write_lines(run / "metrics.jsonl", [{"step": 1, "env/finish_ratio": 0.5}])
    return run


def test_the_change_is_that_of_the_second_closing_tag_alone(run):
    (line,) = plot_action_tokens.measure(run, hops=2)
    tokenizer = AutoTokenizer.from_pretrained(BASE_MODEL)
    ids = tokenizer.encode(PROMPT + "".join(TURNS), add_special_tokens=False)
    log_probs = []
    for folder in (BASE_MODEL, run / "global_step_1" / "actor" / "huggingface"):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        logits = model(torch.tensor([ids[:-1]])).logits[0, -1] / TEMPERATURE
        log_probs.append(float(torch.log_softmax(logits.detach(), -1)[ids[-1]]))
    assert line["queries"] == 1
    assert abs(log_probs[1] - log_probs[0]) > 0.1
    assert line["change"] == pytest.approx(log_probs[1] - log_probs[0], abs=1e-4)


def test_two_runs_become_a_picture(run, tmp_path, monkeypatch):
    other = shutil.copytree(run, tmp_path / "other")
    picture = tmp_path / "picture.png"
    monkeypatch.setattr(sys, "argv", ["plot", f"without={run}", f"with={other}", "--out", str(picture)])
    assert plot_action_tokens.main() == 0
    assert picture.stat().st_size > 1000
    assert len(read_lines(other / "action_tokens.jsonl")) == 1


def test_a_run_without_the_checkpoints_is_refused(run, tmp_path, monkeypatch, capsys):
    other = shutil.copytree(run, tmp_path / "other")
    shutil.rmtree(other / "global_step_1")
    (other / "action_tokens.jsonl").unlink(missing_ok=True)
    monkeypatch.setattr(sys, "argv", ["plot", f"a={other}", "--out", str(tmp_path / "picture.png")])
    assert plot_action_tokens.main() == 2
    assert "trainer.save_freq=1" in capsys.readouterr().err
