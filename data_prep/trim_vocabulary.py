"""A causal language model with fewer words: those that texts use, and the first others of its vocabulary.

    python -m data_prep.trim_vocabulary --model FOLDER --texts corpus.jsonl train.parquet --out FOLDER

    tokenizer.json (BPE: byte-level as Qwen's, or with byte fallback as Gemma's), config.json, weights
      -> words that the texts use, and the pieces that merges make them of; single bytes and letters; special
         tokens; then words in the vocabulary's order, which is about that of their frequency, up to --keep
         (by default up to a multiple of 64)
      -> the same files with new ids, in the order of the old ones, and these rows of embedding and head

All given texts are cut into the same words as before, which is checked, and log-probs are those of the whole
model, renormalised over the words that stay. Other texts may be cut into smaller pieces, but none is lost.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

from data_prep import files, prompts
from verl.utils.announcing import announce

PROMPTS = (prompts.SEARCH_PROMPT, prompts.NO_SEARCH_PROMPT, prompts.RAG_PROMPT, prompts.MICROWORLD_PROMPT)
CONFIGS = ("config.json", "generation_config.json", "tokenizer_config.json")
PLACEHOLDER = re.compile(r"unused|reserved|dummy", re.IGNORECASE)  # special tokens without a meaning
ID_KEYS = re.compile(r"_token_ids?$|suppress_tokens$|_words_ids$|^ids$|^pad_id$")
NO_TEXT = {"id", "_id", "source_id", "data_source"}  # keys of records
Json = dict[str, Any]


def read_texts(paths: Iterable[Path]) -> Iterator[str]:
    """Yield the texts of files.

    These are a .txt file; all strings in the records of .json, .jsonl and .parquet files, as they are and
    after a space; and passages ({title, text} or {contents}) as an observation shows them.
    """

    def strings(record: Any) -> Iterator[str]:
        if isinstance(record, str) and record:
            yield from (record, f" {record}")
        elif isinstance(record, list):
            yield from chain.from_iterable(map(strings, record))
        elif isinstance(record, dict):
            title = record.get("title")
            text = record.get("text")
            if isinstance(title, str) and isinstance(text, str):
                yield prompts.format_observation([(f'"{title}"', text)])
            elif isinstance(contents := record.get("contents"), str):
                title, _, text = contents.partition("\n")
                yield prompts.format_observation([(title, text)])
            yield from chain.from_iterable(strings(record[key]) for key in record.keys() - NO_TEXT)

    for path in paths:
        if path.suffix == ".txt":
            yield files.read_text(path)
        elif path.suffix == ".json":
            yield from strings(files.read_json(path))
        else:
            yield from chain.from_iterable(strings(record) for _, record in files.read_records(path))


def encoded(tokenizer: Any, texts: Iterable[str]) -> Iterator[tuple[str, list[int]]]:
    """Yield each text, and its ids without any added around them."""
    texts = iter(texts)
    while batch := list(islice(texts, 1000)):
        encodings = tokenizer.backend_tokenizer.encode_batch(batch, add_special_tokens=False)
        yield from ((text, encoding.ids) for text, encoding in zip(batch, encodings, strict=True))


def choose(tokenizer: Json, counts: Counter[int], named: set[int], keep: int | None) -> dict[int, int]:
    """Return {old id: new id} of the words that stay, ascending.

    Args:
        tokenizer: tokenizer.json.
        counts: how often the texts use an id.
        named: special tokens in use.
        keep: number of words. None: as many as are needed, up to a multiple of 64.

    Raises:
        ValueError: `keep` is less than what is needed.
    """
    bpe = tokenizer["model"]
    vocab = bpe["vocab"]
    ranks = {tuple(pair): rank for rank, pair in enumerate(bpe["merges"])}
    last = len(ranks)

    def pieces(word: str) -> tuple[set[int], bool]:
        """Return the ids of all pieces on the way to a word, and whether the word is reached.

        The best merge is made again and again. A text that ends up with the word has gone this way too.
        """
        symbols = list(word)
        symbols_seen = {word, *word}
        while len(symbols) > 1:
            best = [ranks.get((left, right), last) for left, right in pairwise(symbols)]
            i = best.index(rank := min(best))
            if rank == last:
                break
            symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
            symbols_seen.add(symbols[i])
        return {vocab[symbol] for symbol in symbols_seen if symbol in vocab}, len(symbols) == 1

    added = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    words = {number: word for word, number in vocab.items() if number not in added}
    ids = set(counts) | named | {i for i, name in added.items() if not PLACEHOLDER.search(name)}
    if bpe.get("byte_fallback"):  # letters outside of ASCII are made of bytes
        ids |= {i for i, word in words.items() if re.fullmatch(r"<0x[0-9A-F]{2}>|[\x20-\x7e]", word)}
    else:
        ids |= {i for i, word in words.items() if len(word) == 1}
    ids = ids.union(*(pieces(words[i])[0] for i in ids if i in words and i in counts))
    keep = -(-len(ids) // 64) * 64 if keep is None else keep
    if len(ids) > keep:
        raise ValueError(
            f"--keep {keep}: expected {len(ids)} or more. The texts use {len(counts)} words; there are also "
            "the pieces that merges make them of, single bytes, and special tokens"
        )
    for i in sorted(words.keys() - ids):
        if len(ids) == keep:
            break
        piece_ids, reached = pieces(words[i])
        if reached and len(ids) + len(piece_ids - ids) <= keep:
            ids |= piece_ids
    return {old: new for new, old in enumerate(sorted(ids))}


def renumber(value: Any, ids: dict[int, int], is_id: bool = False) -> Any:
    """Return configs and post-processors with new ids; ids that are gone are left out of lists."""
    if isinstance(value, dict):
        return {key: renumber(item, ids, bool(ID_KEYS.search(key))) for key, item in value.items()}
    if isinstance(value, list):
        items = [renumber(item, ids, is_id) for item in value]
        return [item for item in items if item is not None]
    return ids.get(value) if is_id and type(value) is int else value


def trim_tokenizer(tokenizer: Json, ids: dict[int, int]) -> Json:
    """Return tokenizer.json with the words that stay, and their new ids."""
    bpe = tokenizer["model"]
    vocab = {word: ids[old] for word, old in bpe["vocab"].items() if old in ids}
    merges = [pair for pair in bpe["merges"] if vocab.keys() >= {*pair, "".join(pair)}]
    added = [token | {"id": ids[token["id"]]} for token in tokenizer["added_tokens"] if token["id"] in ids]
    changed = {"added_tokens": added, "model": bpe | {"vocab": vocab, "merges": merges}}
    return tokenizer | {key: renumber(tokenizer[key], ids) for key in ("padding", "post_processor")} | changed


def trim_weights(model: Any, ids: dict[int, int]) -> None:
    """Keep only the rows of a model's embedding and head that stay; the two may be one matrix.

    Raises ValueError if the model is not supported.
    """
    from torch.nn import Parameter

    rows = list(ids)
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    size = embedding.num_embeddings
    word_parameters = {id(p) for module in (embedding, head) for p in module.parameters()}
    others = [
        name for name, p in model.named_parameters() if size in p.shape and id(p) not in word_parameters
    ]
    if others or head.out_features != size:
        raise ValueError(
            f"--model: {size} words, but a head of {head.out_features} and {others}: not supported"
        )
    is_tied = head.weight is embedding.weight
    embedding.weight = Parameter(embedding.weight.detach()[rows].clone())
    head.weight = embedding.weight if is_tied else Parameter(head.weight.detach()[rows].clone())
    if head.bias is not None:
        head.bias = Parameter(head.bias.detach()[rows].clone())
    embedding.padding_idx = ids.get(embedding.padding_idx)
    embedding.num_embeddings = head.out_features = model.config.vocab_size = len(rows)


def trim(source: Path, paths: list[Path], keep: int | None, out: Path) -> None:
    """Write the folder `out`, whole or not at all.

    Raises ValueError if something is missing or can't be trimmed.
    """
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for path in (source / "tokenizer.json", source / "config.json", *paths):
        if not path.is_file():
            raise ValueError(f"{path} is not there; expected a model with tokenizer.json, and files of texts")
        if path.suffix not in (".txt", ".json", ".jsonl", ".parquet"):
            raise ValueError(f"--texts: {path}: expected a .txt, .json, .jsonl or .parquet file")
    if out.exists():
        raise ValueError(f"--out: {out} is there already; remove it, or name another folder")
    with announce(f"loading {source}"):
        original = AutoTokenizer.from_pretrained(source)
        model = AutoModelForCausalLM.from_pretrained(source, dtype="auto").eval()
    tokenizer = json.loads(original.backend_tokenizer.to_str())
    bpe = tokenizer["model"]
    if bpe["type"] != "BPE" or bpe["continuing_subword_prefix"] or bpe["end_of_word_suffix"]:
        raise ValueError(
            f"--model: found a tokenizer of {bpe['type']}, expected BPE without marks at words' ends"
        )
    configs = {name: files.read_json(source / name) for name in CONFIGS if (source / name).is_file()}
    added = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    special_names = {token for token in original.special_tokens_map.values() if isinstance(token, str)}
    named = {
        i for name, i in added.items() if name in special_names or name in (original.chat_template or "")
    }
    found_ids = [v for config in configs.values() for key, v in config.items() if ID_KEYS.search(key)]
    named |= {i for v in found_ids for i in (v if isinstance(v, list) else [v]) if type(i) is int}
    with announce("counting the words of the texts"):
        words = (ids for _, ids in encoded(original, chain(PROMPTS, read_texts(paths))))
        counts = Counter(chain.from_iterable(words))
        ids = choose(tokenizer, counts, named & set(original.get_vocab().values()), keep)
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    words = (ids for _, ids in encoded(original, chain(read_texts(paths), PROMPTS)))
    sample = torch.tensor([[*original("").input_ids[:1], *islice(chain.from_iterable(words), 127)]])
    with announce("trimming the model"), torch.no_grad():
        before = model(sample).logits[..., list(ids)].double().log_softmax(-1)
        trim_weights(model, ids)
        after = model(sample.apply_(ids.__getitem__)).logits.double().log_softmax(-1)
        if (difference := float((after - before).abs().max())) > 0.1:
            raise ValueError(f"log-probs differ by {difference} from those of the whole model")
        for owner in (model.config, model.generation_config):
            for key in filter(ID_KEYS.search, owner.to_dict()):
                setattr(owner, key, renumber(getattr(owner, key), ids, is_id=True))
        model.save_pretrained(partial)
    removed = {name for name, i in added.items() if i not in ids}
    for name, config in configs.items():
        config = renumber(config, ids) | ({"vocab_size": len(ids)} if "vocab_size" in config else {})
        config.pop("added_tokens_decoder", None)  # tokenizer.json has them
        for key in ("additional_special_tokens", "extra_special_tokens"):
            if isinstance(config.get(key), list):
                config[key] = [token for token in config[key] if str(token) not in removed]
        (partial / name).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    Tokenizer.from_str(json.dumps(trim_tokenizer(tokenizer, ids))).save(str(partial / "tokenizer.json"))
    for path in source.iterdir():  # terms and notices, a chat template
        if path.suffix in (".html", ".md", ".jinja") or path.stem.upper() in ("LICENSE", "NOTICE"):
            shutil.copy(path, partial)
    with announce("checking the texts"):
        small = AutoTokenizer.from_pretrained(partial)
        num_texts = 0
        num_differing = 0
        join_before = original.backend_tokenizer.decode
        join = small.backend_tokenizer.decode
        for text, before in encoded(original, chain(PROMPTS, read_texts(paths))):
            found_ids = small.backend_tokenizer.encode(text, add_special_tokens=False).ids
            joined_text = join(found_ids, skip_special_tokens=False)
            # Normalised letters do not come back, not even with the whole tokenizer.
            is_same = joined_text == text or joined_text == join_before(before, skip_special_tokens=False)
            num_differing += not is_same or found_ids != [ids[i] for i in before]
            num_texts += 1
        begins_alike = small("").input_ids == [ids[i] for i in original("").input_ids]
        if num_differing or len(small) != len(ids) or not begins_alike:
            raise ValueError(
                f"--model: its tokenizer can't be trimmed: {num_differing} of {num_texts} texts come out "
                f"otherwise, {len(small)} words of {len(ids)}"
            )
    partial.rename(out)
    print(f"{out}: {len(ids):,} of {len(original):,} words; the texts use {len(counts):,}")
    print(f"{num_texts:,} texts are cut as before; log-probs differ by {difference:.1e} at most")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="A causal language model with fewer words.")
    add = parser.add_argument
    add("--model", type=Path, required=True, help="Hugging Face folder with a BPE tokenizer.json")
    add("--texts", type=Path, nargs="+", required=True, help=".txt, .json, .jsonl and .parquet files")
    add("--keep", type=int, help="number of words that stay (those needed, up to a multiple of 64)")
    add("--out", type=Path, required=True, help="folder to write")
    return files.run_command(parser, lambda to: trim(to.model, to.texts, to.keep, to.out), argv)


if __name__ == "__main__":
    sys.exit(main())
