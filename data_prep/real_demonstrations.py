"""Demonstrations of searching on real passages, made by a program from training rows; and worked examples.

    python -m data_prep.squad --squad xquad.en.json --split-by article --num-val 64 --prompt base --out D
    python -m data_prep.real_demonstrations --data D --topk 2 --tokenizer MODEL --max-obs-length 500

    train.parquet, val.parquet -> a query -> BM25 -> observation -> (another) -> answer
                               -> sft_train.parquet, sft_val.parquet
    test.parquet, with two examples from train.parquet before each prompt -> test_fewshot.parquet

Rows may also be .jsonl files (`data_prep.own_questions`). Validation rows may be missing, and so may the
worked examples (`--num-examples 0`).

A demonstration shows the form and leaves the rest to reinforcement learning. A share `--good-queries` of the
first queries are the whole question or its content words; the others find less. If the gold passage is not
among the `--topk`, a query of another kind follows, a good one first, up to `--max-searches` in all. A
question whose passage none of them finds is left out. One demonstration in ten searches again without need.

Searches run on the server's BM25, and an observation is a rollout's: train with the same `retriever.topk`.
With `--tokenizer`, an observation of more than `--max-obs-length` tokens is cut as `data.max_obs_length` cuts
it. If an answer is lost by that, the question is left out.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from data_prep import files
from search_r1.llm_agent.generation import INFORMATION_END, format_observation
from search_r1.search.bm25 import BM25Retriever
from search_r1.search.corpus import Corpus
from verl.agent.codec import Codec
from verl.agent.trajectory import AgentConfig
from verl.data.rl_dataset import read_rows, require_columns
from verl.utils.hub import use_cache_if_hub_is_away

# Kinds of queries. The first passage found by them is the right one for .92, .94, .70 and .57 of XQuAD's
# questions.
GOOD = ("question", "content")
POOR = ("names", "fragment")
NEEDLESS = 0.1  # share of demonstrations that search again although the passage is found
STOP_WORDS = """
a about after all also an and any are as at be been before between by can could did do does during
each for from had has have he her his how i if in into is it its kind many much name of on one or
other she some such than that the their them there these they this those to type under up used was
were what when where which who whom whose why will with would you
"""
Turn = tuple[str, list[Any]]  # a query, and the documents that it found


def make_query(question: str, kind: str, rng: random.Random) -> str:
    """Return a question's query of a kind.

    It is the question itself, its content words, its names with the last content word, or two neighbouring
    content words.
    """
    stop_words = STOP_WORDS.split()
    words = re.findall(r"[^\s?!.,;:\"()]+(?:[.,:][^\s?!.,;:\"()]+)*", question)
    content = [(i, word) for i, word in enumerate(words) if word.lower() not in stop_words] or [(0, question)]
    if kind == "question":
        return question
    if kind == "fragment":
        start = rng.randrange(max(1, len(content) - 1))
        content = content[start : start + 2]
    elif kind == "names":
        names = [(i, word) for i, word in content if i and re.search(r"[A-Z0-9]", word)]
        content = sorted({*names, content[-1]}) if names else content[:2]
    return " ".join(word for _, word in content)


class Passages:
    """The corpus behind the BM25 of the server, and what a rollout shows of it."""

    def __init__(self, path: Path, topk: int, codec: Codec | None = None) -> None:
        self.retriever = BM25Retriever(Corpus.open(path))
        self.topk = topk
        self.codec = codec

    def search(self, query: str) -> list[Any]:
        """Return the fields of the passages found, best first."""
        return [document.fields for document in self.retriever.batch_search([query], self.topk)[0][0]]

    def observation(self, documents: list[Any]) -> str:
        """Return the text of an observation, as long as a rollout's."""
        text = format_observation(documents)
        if self.codec is None:
            return text
        return self.codec.decode(self.codec.observation_ids(text, INFORMATION_END))

    def has_gold(self, row: dict[str, Any], documents: list[Any]) -> bool:
        """Return whether the gold passage is among the documents, and its answer in what is shown of them."""
        is_found = any(document["id"] in row["extra_info"]["gold_ids"] for document in documents)
        return is_found and (self.codec is None or row["golden_answers"][0] in self.observation(documents))


def demonstrate(
    row: dict[str, Any], passages: Passages, max_searches: int, good_queries: float, rng: random.Random
) -> list[Turn]:
    """Search until a search finds the gold passage, perhaps once more.

    Returns [] if `max_searches` searches don't find it.
    """
    question = row["question"]
    done = False
    kinds = [rng.choice(GOOD if rng.random() < good_queries else POOR)]
    kinds += [kind for kind in (*rng.sample(GOOD, len(GOOD)), *POOR) if kind not in kinds]
    turns: list[Turn] = []
    for kind in kinds[:max_searches]:
        query = make_query(question, kind, rng)
        if query in (earlier for earlier, _ in turns):
            continue
        turns.append((query, passages.search(query)))
        if done or (passages.has_gold(row, turns[-1][1]) and rng.random() >= NEEDLESS):
            return turns
        done = passages.has_gold(row, turns[-1][1])
    return turns if done else []


def as_segments(row: dict[str, Any], turns: list[Turn], passages: Passages) -> list[dict[str, Any]]:
    """Return a trajectory in a rollout's pieces.

    The pieces are the prompt, and for each turn its text and the observation that came back.
    """
    pieces = [(row["prompt"][0]["content"], False)]
    for query, documents in turns:
        pieces += [(f"<search> {query} </search>", True), (passages.observation(documents), False)]
    pieces.append((f"<answer> {row['golden_answers'][0]} </answer>", True))
    return [{"text": text, "trained": trained} for text, trained in pieces]


def worked_examples(rows: list[dict[str, Any]], passages: Passages, count: int) -> str:
    """Return the `count` shortest right trajectories with the whole question as the query.

    Each is about another gold passage, has an answer of at most four words, and ends in a blank line. Raises
    ValueError if there are fewer.
    """
    shortest: dict[str, str] = {}
    for row in rows:
        documents = passages.search(row["question"])
        if passages.has_gold(row, documents[:1]) and len(row["golden_answers"][0].split()) <= 4:
            pieces = as_segments(row, [(row["question"], documents)], passages)
            text = "".join(piece["text"] for piece in pieces) + "\n\n"
            gold = documents[0]["id"]
            shortest[gold] = min(shortest.get(gold, text), text, key=len)
    if len(shortest) < count:
        raise ValueError(f"--num-examples {count}: only {len(shortest)} training rows make one")
    return "".join(sorted(shortest.values(), key=len)[:count])


def write_rows(options: argparse.Namespace) -> dict[str, int]:
    """Write the files, as the command's options say; return the number of rows of each.

    Raises ValueError for bad options or missing files.
    """
    data = options.data
    options.out = out = options.out or data  # the command prints where the files are
    for name in ("topk", "variants", "max_searches", "num_examples", "max_obs_length"):
        least = 0 if name == "num_examples" else 1
        if getattr(options, name) < least:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(options, name)}: give at least {least}")
    if not 0 <= options.good_queries <= 1:
        raise ValueError(f"--good-queries {options.good_queries}: give a number from 0 to 1")

    def check(columns: Iterable[str], where: str) -> None:
        needed = ("question", "golden_answers", "prompt", "extra_info")
        require_columns(columns, needed, where, "data_prep.squad makes such rows.")

    rows: dict[str, list[dict[str, Any]]] = {"val": []}
    for name in ("train", "val", "test"):
        path = files.rows_file(data, name)
        if path is not None:
            rows[name] = [row for _, row in read_rows(str(path), check)]
        elif name != "val":
            raise ValueError(
                f"{data} holds no {name}.parquet and no {name}.jsonl: search-r1 squad makes them"
            )
    for row in rows["train"] + rows["val"]:
        files.get_field(row["extra_info"], "gold_ids", list, f"{data}, {row.get('id')}, extra_info")
    codec = None
    if options.tokenizer is not None:
        use_cache_if_hub_is_away({"--tokenizer": str(options.tokenizer)})
        tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
        codec = Codec(tokenizer, AgentConfig(1, 1, 2, 1, options.max_obs_length))
    passages = Passages(data / "corpus.jsonl", options.topk, codec)
    rng = random.Random(f"real demonstrations {options.seed}")
    written = {}
    for name in ("val", "train"):  # to train_sft.sh the file written last is the sign that both exist
        sft_rows = []
        for row in rows[name]:
            seen: list[list[Turn]] = [[]]
            for _ in range(options.variants if name == "train" else 1):
                turns = demonstrate(row, passages, options.max_searches, options.good_queries, rng)
                if turns not in seen:
                    seen.append(turns)
                    demonstration = {"question": row["question"], "answer": row["golden_answers"][0]}
                    demonstration["segments"] = as_segments(row, turns, passages)
                    sft_rows.append(demonstration | {"searches": len(turns)})
        if not rows[name]:
            continue
        if not sft_rows:
            raise ValueError(
                f"{data}: no search finds the answer to a question of {name}; are the documents right?"
            )
        written[f"sft_{name}.parquet"] = files.write_parquet(out / f"sft_{name}.parquet", sft_rows)
    if options.num_examples == 0:
        return written
    examples = worked_examples(rows["train"], passages, options.num_examples)
    for row in rows["test"]:
        row["prompt"][0]["content"] = examples + row["prompt"][0]["content"]
    path = out / "test_fewshot.parquet"
    return written | {path.name: files.write_parquet(path, rows["test"])}


def main() -> int:
    parser = argparse.ArgumentParser(description="Demonstrations of searching on real passages.")
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder of corpus.jsonl and rows: train, test, perhaps val")
    add("--out", type=Path, help="folder to write to (the same)")
    add("--topk", type=int, default=2, help="passages in an observation, as retriever.topk of the runs (2)")
    add("--tokenizer", type=Path, help="model folder, to cut long observations as its runs do")
    add("--max-obs-length", type=int, default=500, help="tokens, as data.max_obs_length of the runs (500)")
    add("--variants", type=int, default=2, help="demonstrations of each training question (2)")
    add("--max-searches", type=int, default=3, help="most searches of one, as max_turns of the runs (3)")
    add("--good-queries", type=float, default=0.65, help="share of good first queries (0.65)")
    add(
        "--num-examples",
        type=int,
        default=2,
        help="worked examples in test_fewshot.parquet (2); 0: no such file",
    )
    add("--seed", type=int, default=0, help="of the queries (0)")
    return files.run_command(parser, write_rows)


if __name__ == "__main__":
    sys.exit(main())
