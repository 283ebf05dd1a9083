"""Stop strings: found wherever token boundaries fall, at the token that completes them."""

from __future__ import annotations

import pytest
from rollout_models import VOCAB, hf_greedy, make_engine, make_model, run
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from verl.sessions.engine_contract import SamplingParams
from verl.sessions.stop import StopCondition, token_bytes

EXTRA = ["</", "search", "sea", "rch", ">Ċ", ">ĠĊx", "Ġ</", "Ġ<", "</search>", "a</search>b", "answer", "h>"]


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """The 256 bytes, then EXTRA, as a byte-level BPE vocabulary; "<|end|>" is an added special token."""
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *EXTRA]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    words = ["▁the", "▁</", "</", "search", ">", "<0x3E>", "<0x0A>", "▁"]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


TOKENIZER = byte_level_tokenizer()


def ids(*tokens: str) -> list[int]:
    return TOKENIZER.convert_tokens_to_ids(list(tokens))


@pytest.mark.parametrize(
    "tokens",
    [
        ("</search>",),
        ("</", "search", ">"),
        ("</", "sea", "rch", ">"),
        ("<", "/", "s", "e", "a", "r", "c", "h", ">"),
        ("</", "search", ">Ċ"),
        ("</", "search", ">ĠĊx"),
        ("Ġ</", "sea", "r", "c", "h>"),
        ("x", "a</search>b"),
        ("</search>", "</", "search", ">"),
    ],
)
def test_a_stop_string_is_found_wherever_the_token_boundaries_fall(tokens: tuple[str, ...]) -> None:
    stop = StopCondition(TOKENIZER, ["</search>", "</answer>"])
    assert None not in ids(*tokens)
    assert stop.match(ids(*tokens)) == "</search>"
    assert ids(*tokens)[-1] in stop.candidate_ids


@pytest.mark.parametrize(
    "tokens",
    [
        ("</", "search"),
        ("</", "answer", "Ġ</", "search"),
        ("search", ">"),
        ("<", "search", ">"),
        ("</search>", "x"),  # completed earlier, not by the last token
        ("</search>", ">"),
        ("</", "search", "Ġ<", ">"),
        (),
    ],
)
def test_nothing_is_found_where_the_last_token_completes_nothing(tokens: tuple[str, ...]) -> None:
    assert StopCondition(TOKENIZER, ["</search>", "</answer>"]).match(ids(*tokens)) is None


def test_strings_outside_ascii_are_matched_by_their_bytes() -> None:
    stop = StopCondition(TOKENIZER, ["終"])
    tokens = TOKENIZER.convert_tokens_to_ids(TOKENIZER.tokenize("終"))
    assert len(tokens) == 3
    assert [stop.match(tokens[: end + 1]) for end in range(3)] == [None, None, "終"]


def test_sentencepiece_spaces_and_byte_tokens_are_read() -> None:
    tokenizer = sentencepiece_tokenizer()
    assert token_bytes(tokenizer)[:8] == [b" the", b" </", b"</", b"search", b">", b">", b"\n", b" "]
    stop = StopCondition(tokenizer, [" </search>"])
    assert stop.match([1, 3, 4]) == stop.match([7, 2, 3, 5]) == " </search>"
    assert stop.match([2, 3, 4]) is None


@pytest.mark.parametrize("strings", [[], ["</search>", ""], "</search>"])
def test_stop_strings_that_make_no_sense_are_refused(strings: list[str]) -> None:
    with pytest.raises(ValueError, match="stop strings"):
        StopCondition(TOKENIZER, strings)


def test_the_engine_stops_at_the_completing_token_and_not_on_a_prompt() -> None:
    """Greedy tokens are known, so the string that two of them spell must end the turn right there."""
    model = make_model()
    tokens = hf_greedy(model, [1, 2, 3], 16)
    words = TOKENIZER.convert_ids_to_tokens(range(VOCAB))
    pieces = token_bytes(TOKENIZER)
    string = (pieces[tokens[6]] + pieces[tokens[7]]).decode("utf-8")
    assert all(len(word) == 1 for word in words)
    stop = StopCondition(TOKENIZER, [string])
    expected = next(end for end in range(1, 16) if tokens[end - 1 : end + 1] == tokens[6:8]) + 1
    engine = make_engine(model)
    params = SamplingParams(16, temperature=0.0, stop=stop, eos_token_ids=frozenset({tokens[7]}))
    first = engine.open([1, 2, 3], SamplingParams(16, temperature=0.0, stop=stop))
    completion = run(engine)[first]
    assert completion.token_ids == tokens[:expected]
    assert (completion.finish_reason, completion.stop_string) == ("stop", string)
    second = engine.open([1, 2, 3, *tokens[:7]], params)  # the string's first half stands in the prompt
    completion = run(engine)[second]
    assert (completion.token_ids, completion.finish_reason) == ([tokens[7]], "eos")
