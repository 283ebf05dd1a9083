"""Tools of the framework that know nothing of workers and trainer."""

from __future__ import annotations

from typing import Any


def hf_tokenizer(name_or_path: str, correct_pad_token: bool = True, **kwargs: Any) -> Any:
    """Load a Hugging Face tokenizer.

    Args:
        name_or_path: name on the hub, or folder.
        correct_pad_token: whether a tokenizer without a padding token pads with its end of sequence. This is
            for your own code; the framework never finds padding by comparing ids.
        **kwargs: passed to `AutoTokenizer.from_pretrained`.

    Raises:
        ValueError: no tokenizer can be read from there.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name_or_path, **kwargs)
    except OSError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{name_or_path}: no tokenizer can be read there ({reason})") from error
    if correct_pad_token and tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
        tokenizer.pad_token_id = tokenizer.eos_token_id
    return tokenizer


def num_token_ids(tokenizer: Any) -> int:
    """Return a number that all ids of a tokenizer are smaller than."""
    return max([len(tokenizer), *(token_id + 1 for token_id in tokenizer.added_tokens_decoder)])


def check_token_ids(tokenizer: Any, vocab_size: int, model: str) -> None:
    """Check that a model knows the tokens that its tokenizer makes of ordinary text.

    Special tokens may be beyond the model's vocabulary, as Gemma 3's token of an image is. Only rows can hold
    them (`RowCheck`, `SFTDataset`), because observations spell them as plain text (`Codec.encode`).

    Args:
        tokenizer: the tokenizer.
        vocab_size: the number of rows of the model's embedding.
        model: the model's folder or name, for the message.

    Raises:
        ValueError: an ordinary token is beyond the vocabulary.
    """
    if num_token_ids(tokenizer) <= vocab_size:
        return
    added_tokens = tokenizer.added_tokens_decoder
    unknown = {
        token_id: token
        for token, token_id in tokenizer.get_vocab().items()
        if token_id >= vocab_size and not (token_id in added_tokens and added_tokens[token_id].special)
    }
    if unknown:
        first = min(unknown)
        raise ValueError(
            f"Model {model}: found {len(unknown)} tokens of the tokenizer beyond the model's vocabulary (the "
            f"first: {unknown[first]!r} with the id {first}); expected ids below {vocab_size}, the number of "
            f"rows of its embedding. Take the tokenizer of these weights, or add rows to the embedding with "
            f"resize_token_embeddings({num_token_ids(tokenizer)}) of transformers, and save the model."
        )
