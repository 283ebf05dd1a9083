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
