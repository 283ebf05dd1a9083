"""Tokenizers with more tokens than the model's embedding has rows are refused, wherever a model is loaded."""

import re
import shutil
from pathlib import Path

import pytest
from transformers import AddedToken, AutoTokenizer

import infer
from verl.inference.server import main as serve
from verl.utils import check_token_ids, num_token_ids

MODEL = Path(__file__).resolve().parents[2] / "data_prep" / "base_model"
SIZE = 2560
EXPECTED = "2 tokens of the tokenizer beyond the model's vocabulary (the first: '<tool>' with the id 2560)"


@pytest.fixture
def folder(tmp_path):
    """Return a copy of the shipped model whose tokenizer has two more words."""
    folder = shutil.copytree(MODEL, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<tool>", "</tool>", "Question"])  # "Question" is there already
    tokenizer.save_pretrained(folder)
    return folder


def test_words_beyond_the_embedding_are_named(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with pytest.raises(ValueError, match=re.escape(EXPECTED)):
        check_token_ids(tokenizer, SIZE, "mine")
    check_token_ids(tokenizer, num_token_ids(tokenizer), "mine")
    with pytest.raises(ValueError, match="160 tokens"):  # of another model's vocabulary
        check_token_ids(tokenizer, 2400, "mine")


def test_a_special_token_beyond_the_embedding_is_allowed_as_gemma_3_has_one():
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken("<image>", special=True)]})
    assert num_token_ids(tokenizer) == SIZE + 1
    check_token_ids(tokenizer, SIZE, "mine")


def test_the_inference_server_refuses_them(folder, capsys):
    with pytest.raises(SystemExit) as ended:
        serve(["--model", str(folder), "--port", "0"])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and EXPECTED in error and len(error.strip().splitlines()) == 1


def test_infer_refuses_them(folder):
    settings, _ = infer.find_settings(str(folder), None, None)
    with pytest.raises(ValueError, match=re.escape(EXPECTED)):
        infer.load_manager(str(folder), settings, infer.build_parser().parse_args([]), infer.Console())
