"""Pretraining: killed runs go on to the same weights, exports load, evaluation reports."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from data_prep.base_evaluation import evaluate
from data_prep.pretrain_base import Pretraining, Settings

TINY = Settings(
    num_pools=6, samples_per_pool=6, tokens_per_batch=600, warmup_pools=2, mix_pools=2,
    decay_pools=3, hidden_size=64, num_layers=1, num_heads=1, head_dim=64, intermediate_size=64,
)  # fmt: skip


def weights(run):
    return torch.cat([p.detach().flatten() for p in run.model.parameters()])


def train(work, settings=TINY, pools=None):
    run = Pretraining(settings, work)
    lines = list(run.run(checkpoint_seconds=1e9, eval_pools=1000, stop_after=pools))
    return run, lines


@pytest.mark.slow
def test_a_run_that_stopped_goes_on_to_the_same_weights(tmp_path):
    whole, lines = train(tmp_path / "whole")
    train(tmp_path / "parts", pools=2)
    train(tmp_path / "parts", pools=1)
    parts, _ = train(tmp_path / "parts")
    assert whole.next_pool == parts.next_pool == 6
    assert torch.equal(weights(whole), weights(parts))
    assert set(lines[-1]) >= {"pool", "tokens", "loss", "read1", "read2", "bridge"}


@pytest.mark.slow
def test_export_loads_with_the_auto_classes_and_gives_the_same_logits(tmp_path):
    run, _ = train(tmp_path, pools=1)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert model.config.model_type == "qwen3"
    ids = torch.tensor([tokenizer.encode("Question: Who directed Amber Harbor?\n", add_special_tokens=False)])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, run.model(ids).logits)


@pytest.mark.slow
def test_evaluation_reports_reading_and_searching_by_hops(tmp_path):
    train(tmp_path, pools=1)
    figures = evaluate(tmp_path / "hf", count=4)
    names = ("val/sampled/em/hops_1", "val_extra/greedy/em/hops_3", "val/sampled/searches/hops_2")
    assert {"read1", "read2", "bridge", *names} <= set(figures)
    assert all(0 <= value <= 3 for value in figures.values())
    assert evaluate(tmp_path / "hf", count=4) == figures
