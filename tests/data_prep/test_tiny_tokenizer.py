"""The tiny tokenizer: words and tags are single tokens, and every text comes back."""

import pytest

from data_prep.microworld import evaluation_world
from data_prep.prompts import SEARCH_PROMPT, format_observation
from data_prep.tiny_tokenizer import END_TOKEN, PAD_TOKEN, TAGS, first_words, inventory_words, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer()


def encode(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


def test_every_inventory_word_is_one_token_after_a_space(tokenizer):
    assert [word for word in inventory_words() if len(encode(tokenizer, f" {word}")) != 1] == []


def test_every_first_word_of_a_title_is_one_token_after_a_quote(tokenizer):
    assert [word for word in first_words() if len(encode(tokenizer, f'"{word}')) != 2] == []


def test_tags_are_single_ordinary_tokens_that_survive_decoding(tokenizer):
    for tag in TAGS:
        assert len(encode(tokenizer, tag)) == 1
        assert tokenizer.decode(encode(tokenizer, f"a{tag}b"), skip_special_tokens=True) == f"a{tag}b"
    assert not set(TAGS) & set(tokenizer.all_special_tokens)


def test_end_and_pad_are_different_special_tokens(tokenizer):
    assert tokenizer.eos_token == END_TOKEN
    assert tokenizer.pad_token == PAD_TOKEN
    assert tokenizer.eos_token_id != tokenizer.pad_token_id
    assert encode(tokenizer, f"x{END_TOKEN}")[-1] == tokenizer.eos_token_id


def test_any_text_comes_back_unchanged(tokenizer):
    texts = ["Ünïcode 漢字 🎻\n\ttabs  and   spaces ", SEARCH_PROMPT, "<sear ch> </search > don't ,."]
    for entity in list(evaluation_world(5)[1].values())[:40]:
        texts.append(format_observation([(f'"{entity.name}"', entity.text)]))
    for text in texts:
        assert tokenizer.decode(encode(tokenizer, text)) == text


def test_two_documents_fit_in_an_observation_of_about_a_hundred_tokens(tokenizer):
    entities = list(evaluation_world(5)[1].values())
    lengths = []
    for first, second in zip(entities[::2], entities[1::2], strict=True):
        documents = [(f'"{entity.name}"', entity.text) for entity in (first, second)]
        lengths.append(len(encode(tokenizer, format_observation(documents))))
    assert 60 <= sum(lengths) / len(lengths) <= 130
    assert max(lengths) < 170


def test_saved_tokenizer_loads_with_autotokenizer_and_encodes_the_same(tokenizer, tmp_path):
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "Question: Who directed Amber Harbor?\n<search> Amber Harbor</search>\n\n<information>Doc"
    assert encode(loaded, text) == encode(tokenizer, text)
    assert loaded.chat_template is None


def test_a_vocabulary_that_is_too_small_is_refused():
    with pytest.raises(ValueError, match="not one token at vocab_size 1200"):
        train_tokenizer(vocab_size=1200, num_worlds=1)
