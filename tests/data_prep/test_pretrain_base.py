"""Pretraining: the same settings give the same weights, which load as a Hugging Face folder."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from data_prep.pretrain_base import PretrainingSettings, export, train

TINY = PretrainingSettings(
    num_pools=2, samples_per_pool=6, tokens_per_batch=600, warmup_pools=2, mix_pools=2,
    decay_pools=3, hidden_size=64, num_hidden_layers=1, num_attention_heads=1, head_dim=64,
    intermediate_size=64,
)  # fmt: skip


@pytest.mark.slow
def test_the_exported_model_is_the_trained_one_and_the_same_again(tmp_path):
    for name in ("one", "two"):
        model, tokenizer = train(TINY)
        export(model, tokenizer, tmp_path / name)
    assert (tmp_path / "one/model.safetensors").read_bytes() == (
        tmp_path / "two/model.safetensors"
    ).read_bytes()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "one", dtype=torch.float32)
    assert loaded.config.model_type == "qwen3" and not loaded.config.tie_word_embeddings
    ids = AutoTokenizer.from_pretrained(tmp_path / "one").encode("Who directed Amber Harbor?\n")
    with torch.no_grad():
        assert torch.equal(loaded(torch.tensor([ids])).logits, model(torch.tensor([ids])).logits)
