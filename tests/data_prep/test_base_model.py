"""The shipped base models: small, made by the script beside them."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import data_prep
from data_prep.pretrain_base import PretrainingSettings, build_model
from data_prep.tiny_tokenizer import train_tokenizer

FOLDER = Path(data_prep.__file__).parent / "base_model"
PLAIN = FOLDER.with_name("base_model_plain")


@pytest.mark.parametrize("folder", [FOLDER, PLAIN])
def test_folder_is_at_most_12_megabytes(folder):
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 12_000_000


@pytest.fixture(scope="module")
def made():
    return train_tokenizer()


@pytest.mark.parametrize("folder", [FOLDER, PLAIN])
def test_shapes_and_tokenizer_are_what_the_script_makes(folder, made):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.get_vocab() == made.get_vocab()
    assert tokenizer.chat_template is None
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    fresh = build_model(PretrainingSettings(), made)
    # state_dict names the head of a tied model too; the shipped one has a head of its own
    assert {n: p.shape for n, p in model.state_dict().items()} == {
        n: p.shape for n, p in fresh.state_dict().items()
    }
    assert model.config.model_type == "qwen3" and not model.config.tie_word_embeddings
    assert 1_000_000 <= sum(p.numel() for p in model.parameters()) <= 4_000_000
