"""The tiny tokenizer: words and tags are single tokens, and every text comes back."""

import pytest

from data_prep.microworld import evaluation_world
from data_prep.prompts import SEARCH_PROMPT, format_observation
from data_prep.tiny_tokenizer import TAGS, inventory_words, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer()


def encode(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


def test_every_inventory_word_is_one_token_after_a_space(tokenizer):
    assert [word for word in inventory_words() if len(encode(tokenizer, f" {word}")) != 1] == []


def test_tags_are_single_ordinary_tokens_that_survive_decoding(tokenizer):
    for tag in TAGS:
        assert len(encode(tokenizer, tag)) == 1
        assert tokenizer.decode(encode(tokenizer, f"a{tag}b"), skip_special_tokens=True) == f"a{tag}b"
    assert not set(TAGS) & set(tokenizer.all_special_tokens)


def test_any_text_comes_back_unchanged(tokenizer):
    texts = ["Ünïcode 漢字 🎻\n\ttabs  and   spaces ", SEARCH_PROMPT, "<sear ch> </search > don't ,."]
    for entity in list(evaluation_world(5)[1].values())[:40]:
        texts.append(format_observation([(f'"{entity.name}"', entity.text)]))
    for text in texts:
        assert tokenizer.decode(encode(tokenizer, text)) == text
