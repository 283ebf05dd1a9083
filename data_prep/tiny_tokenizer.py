"""The tiny base model's tokenizer: a byte-level BPE in which each word of the microworlds is one token.

It is trained on the text of pretraining worlds. The tags of the protocol are single ordinary tokens (not
special: decoding keeps them), `<|endoftext|>` ends a text and `<|pad|>` fills. Any other text is split into
bytes and pieces, so every string can be encoded and comes back unchanged.
"""

from __future__ import annotations

import random

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from data_prep.microworld import FIRST_PRETRAINING_SEED, ask, pretraining_world
from data_prep.names import NAME_PARTS, VALUES
from data_prep.prompts import MICROWORLD_PROMPT, SEARCH_PROMPT, fill_prompt, format_observation
from data_prep.relations import RELATIONS, chains

END_TOKEN = "<|endoftext|>"
PAD_TOKEN = "<|pad|>"
TAGS = [f"<{slash}{tag}>" for tag in ("think", "search", "information", "answer") for slash in ("", "/")]


def first_words() -> list[str]:
    """Return the words that can begin a title, directly after its quote and without a space."""
    return sorted({word for first, _ in NAME_PARTS.values() for word in first})


def inventory_words() -> list[str]:
    """Return every word that names and plain values are made of."""
    parts = {word for first, second in NAME_PARTS.values() for word in (*first, *second)}
    return sorted(parts | {word for words in VALUES.values() for word in words})


def training_texts(num_worlds: int) -> list[str]:
    """Return articles, questions and prompts of pretraining worlds.

    Each inventory word occurs often enough to be merged.
    """
    texts = [SEARCH_PROMPT]
    for seed in range(FIRST_PRETRAINING_SEED, FIRST_PRETRAINING_SEED + num_worlds):
        world = pretraining_world(seed)
        rng = random.Random(seed)
        for entity in world.values():
            texts.append(format_observation([(f'"{entity.name}"', entity.text)]))
            fitting = [c for h in (1, 2, 3) for c in chains(h) if RELATIONS[c[0]].subject == entity.kind]
            question = ask(rng, world, entity, rng.choice(fitting))
            if question is not None:
                texts.append(fill_prompt(MICROWORLD_PROMPT, question.text))
    texts += [f" {word}" * 200 for word in inventory_words()]
    texts += [f'"{word} ' * 200 for word in first_words()]
    texts += [" ".join(f"Doc {i}(Title:" for i in range(1, 6)) * 200]
    return texts


def train_tokenizer(vocab_size: int = 2560, num_worlds: int = 20) -> PreTrainedTokenizerFast:
    """Train a tokenizer of at most `vocab_size` tokens.

    Raises ValueError if that is too few for one token per word.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    size = vocab_size - len(TAGS) - 2
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    texts = training_texts(num_worlds)
    for tag in TAGS:  # tags must not shape the merges, because they never reach the BPE
        texts = [text.replace(tag, "") for text in texts]
    bpe.train_from_iterator(texts, trainer)
    bpe.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in TAGS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=END_TOKEN, pad_token=PAD_TOKEN, clean_up_tokenization_spaces=False
    )
    tokenizer.model_max_length = 2048
    split_words = [
        w for w in inventory_words() if len(tokenizer.encode(f" {w}", add_special_tokens=False)) != 1
    ]
    split_words += [w for w in first_words() if len(tokenizer.encode(w, add_special_tokens=False)) != 1]
    if split_words:
        raise ValueError(
            f"vocab_size {vocab_size}: raise it for a token to each of {split_words[:5]} and others"
        )
    return tokenizer
