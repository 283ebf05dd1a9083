"""Tools of the framework that know nothing of workers and trainer."""

from __future__ import annotations

from typing import Any


def hf_tokenizer(name_or_path: str, correct_pad_token: bool = True, **kwargs: Any) -> Any:
    """A Hugging Face tokenizer; with `correct_pad_token` its end of sequence pads if it has no padding token
    (for users' own code: here padding is never found by comparing ids). ValueError: there is none.
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
