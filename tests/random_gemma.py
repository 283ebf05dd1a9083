"""A small random model of Gemma 3's shape, in place of one that is fetched."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoTokenizer, Gemma3ForCausalLM, Gemma3TextConfig

BASE_MODEL = Path(__file__).parents[1] / "data_prep" / "base_model"


def write_random_gemma(folder: Path) -> None:
    """Write the model, with the vocabulary of the shipped tiny model."""
    tokenizer = AutoTokenizer.from_pretrained(BASE_MODEL)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 64}
    sizes |= {"vocab_size": len(tokenizer), "layer_types": ["sliding_attention", "full_attention"]}
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    Gemma3ForCausalLM(Gemma3TextConfig(bos_token_id=None, **ids, **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
