"""Qwen2 models with random weights in three sizes, for benchmarks. Their words are the shipped model's."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

ROOT = Path(__file__).resolve().parents[2]
SHIPPED_MODEL = ROOT / "data_prep" / "base_model"
NUM_WORDS = 2560
SIZES = {"1.3M": (128, 4, 4), "30M": (512, 8, 8), "120M": (1024, 8, 16)}  # hidden size, layers, heads


def write_random_qwen2(size: str, folder: Path) -> None:
    """Write a model of one of SIZES, with the tokenizer of the shipped model, into a folder."""
    hidden, num_layers, num_heads = SIZES[size]
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED_MODEL)
    tokenizer.model_max_length = 16384
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=NUM_WORDS,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads // 2,
        max_position_embeddings=16384,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
