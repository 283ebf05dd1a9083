"""scripts/diff_logprobs.py: engines agree with the trainer, and a difference that was planted is found."""

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("diff_logprobs", ROOT / "scripts" / "diff_logprobs.py")
diff_logprobs = importlib.util.module_from_spec(spec)
sys.modules["diff_logprobs"] = diff_logprobs
spec.loader.exec_module(diff_logprobs)

SMALL = ["--num-prompts", "3", "--max-tokens", "5", "--dtypes", "float32"]


def run(monkeypatch, capsys, *options: str) -> str:
    monkeypatch.setattr(sys, "argv", ["diff_logprobs.py", *SMALL, *options])
    diff_logprobs.main()
    return capsys.readouterr().out


@pytest.mark.slow
def test_native_and_transformers_agree_with_the_trainer_in_float32(monkeypatch, capsys):
    rows = json.loads(run(monkeypatch, capsys, "--engines", "native,transformers", "--json"))
    assert [(row["engine"], row["sampling"]) for row in rows] == [
        (engine, sampling)
        for engine in ("native", "transformers")
        for sampling in ("temperature 1", "temperature 0.7", "temperature 0.7, top-p 0.9")
    ]
    for row in rows:
        assert row["num_tokens"] == 3 * 2 * 5  # prompts, turns, tokens
        assert row["mean"] <= row["max"] < 1e-4 and abs(row["kl"]) < 1e-5
        assert row["max"] == pytest.approx(abs(row["engine_log_prob"] - row["trainer_log_prob"]))
    text = run(monkeypatch, capsys, "--engines", "native").splitlines()
    assert len(text) == 4 and text[1].startswith("native  float32  temperature 1")


def test_a_difference_names_its_prompt_place_and_token():
    arguments = diff_logprobs.parser().parse_args([*SMALL, "--engines", "native"])
    config = diff_logprobs.configuration(arguments)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    prompts = diff_logprobs.load_prompts(arguments, config, tokenizer)
    trainer = diff_logprobs.make_trainer(config, torch.device("cpu"))
    sampling = diff_logprobs.samplings(0.7, 0.9)[0]
    trajectories = [
        diff_logprobs.Trajectory(prompt, [9, 8, 7, 6], [-1.0, None, -1.0, -1.0]) for prompt in prompts
    ]
    batch = diff_logprobs.to_batch(trajectories)
    right = diff_logprobs.compute_log_prob(trainer, batch, diff_logprobs.LIMITS, 1.0)
    for row, trajectory in enumerate(trajectories):
        trajectory.log_probs = [right[row, i].item() if i != 1 else None for i in range(4)]
    trajectories[2].log_probs[3] += 0.25
    off = diff_logprobs.difference(
        "native", "float32", sampling, diff_logprobs.to_batch(trajectories), trainer, tokenizer
    )
    assert (off.prompt, off.place, off.token, off.num_tokens) == (2, 3, tokenizer.decode([6]), 9)
    assert off.max == pytest.approx(0.25, abs=1e-6) and off.mean == pytest.approx(0.25 / 9, abs=1e-6)
    assert off.engine_log_prob - off.trainer_log_prob == pytest.approx(0.25, abs=1e-6)
    assert "0.25" not in diff_logprobs.table([replace(off, max=0.0)]) and "2.50e-01" in diff_logprobs.table(
        [off]
    )


def test_an_unknown_engine_is_refused(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run(monkeypatch, capsys, "--engines", "sglang")
    assert "found 'sglang', expected any of native, vllm" in capsys.readouterr().err
