"""From rollouts to rows that train: those that verified are demonstrations, the others lie beside.

results.jsonl -> kept (passed, best or all; no two alike) -> sft_train.parquet, sft_val.parquet: train_sft.sh
                                                          -> train.parquet: train_grpo.sh
                 the others, each with the reason         -> rejected.jsonl
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl.utils.records.files import plain, to_json, write_lines

_SPACES = re.compile(r"\s+")


def segments_of(line: Mapping[str, Any], end_token: str | None) -> list[dict[str, Any]]:
    """A rollout as pieces of text, {text, trained}: the prompt, then what the policy wrote (trained) and what
    it was told, by turns. end_token: of the tokenizer, which training adds itself.
    """
    marked = zip(line["token_mask"], line["tokens"], strict=True)
    runs = [
        (bool(mask), "".join(text for _, text in run))
        for mask, run in itertools.groupby(marked, key=lambda pair: pair[0])
    ]
    if runs and runs[-1][0] and end_token:
        runs[-1] = True, runs[-1][1].removesuffix(end_token)
    pieces = [(False, line["prompt"]), *runs]
    return [{"text": text, "trained": trained} for trained, text in pieces if text]


def messages_of(line: Mapping[str, Any], row: Mapping[str, Any]) -> list[dict[str, str]]:
    """A rollout by messages as a conversation, [{role, content}, ...]: of its row, then by turns."""
    asked = (
        row["prompt"] if not isinstance(row["prompt"], str) else [{"role": "user", "content": row["prompt"]}]
    )
    marked = zip(line["token_mask"], line["tokens"], strict=True)
    said = [{"role": "assistant" if mask else "user", "content": text} for mask, text in marked]
    return [{"role": each["role"], "content": each["content"]} for each in (*asked, *said)]


def choose(
    lines: Sequence[dict[str, Any]], keep: str, per_prompt: int, solved_at: float
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(kept, rejected): of each example at most `per_prompt`, the best first and of equal ones the shorter.

    keep: "passed" (a reward of `solved_at` or more), "best" (whatever the reward, if it is known), "all". Two
    rollouts of one text are one. The rejected have a `rejected`: why.
    """
    kept: list[dict[str, Any]] = []
    rejected: list[dict[str, Any]] = []
    counts: dict[int, int] = {}
    seen: set[str] = set()

    def order(line: dict[str, Any]) -> tuple[Any, ...]:
        worth = float("-inf") if line["reward"] is None else line["reward"]
        return line["example_id"], -worth, line["completion_len"], line["rollout_idx"]

    for line in sorted(lines, key=order):
        text = _SPACES.sub(" ", line["prompt"] + line["completion"]).strip().lower()
        why = ""
        if line["reward"] is None and keep != "all":
            why = "unverified"
        elif keep == "passed" and line["reward"] < solved_at:
            why = f"reward {line['reward']:g}"
        elif text in seen:
            why = "a duplicate"
        elif counts.get(line["example_id"], 0) >= per_prompt:
            why = f"the example has {per_prompt} already"
        if why:
            rejected.append({**line, "rejected": why})
            continue
        seen.add(text)
        counts[line["example_id"]] = counts.get(line["example_id"], 0) + 1
        kept.append(line)
    return kept, rejected


def write_rows(
    kept: Sequence[dict[str, Any]],
    rejected: Sequence[dict[str, Any]],
    rows: Sequence[Mapping[str, Any]],
    folder: Path,
    model: str,
    end_token: str | None,
    val_share: float,
    seed: int,
    as_messages: bool = False,
) -> dict[str, int]:
    """Writes the files; returns how many rows each has. rows: the benchmark's, by example_id; all rollouts of
    an example are in one of sft_train and sft_val. as_messages: rollouts are conversations; their rows have
    `messages` in place of `segments`. ValueError: nothing is kept.
    """
    write_lines(folder / "rejected.jsonl", rejected)
    if not kept:
        raise ValueError(
            f"{folder}: none of {len(rejected)} rollouts is kept; rejected.jsonl says why of each."
        )
    demonstrations: dict[str, list[dict[str, Any]]] = {"sft_train.parquet": [], "sft_val.parquet": []}
    examples = sorted({line["example_id"] for line in kept})
    held_out = set(random.Random(seed).sample(examples, int(val_share * len(examples))))
    for line in kept:
        usage = {name: line[name] for name in ("prompt_tokens", "completion_tokens", "cost") if name in line}
        demonstrations["sft_val.parquet" if line["example_id"] in held_out else "sft_train.parquet"].append(
            {
                **(
                    {"messages": messages_of(line, rows[line["example_id"]])}
                    if as_messages
                    else {"segments": segments_of(line, end_token)}
                ),
                "question": line["question"],
                "answer": line["answer"],
                "reward": line["reward"],
                "verdicts": to_json(line.get("verdicts")),
                "model": model,
                "usage": to_json(usage | {"sampled_tokens": line["completion_len"]}),
                "example_id": line["example_id"],
                "rollout_idx": line["rollout_idx"],
            }
        )
    prompts = [{**plain(rows[example]), "synthesized_by": model} for example in examples]
    counts = {"rejected.jsonl": len(rejected)}
    for name, table in {**demonstrations, "train.parquet": prompts}.items():
        counts[name] = len(table)
        (folder / name).unlink(missing_ok=True)
        if table:
            aside = folder / f"{name}.part"
            pq.write_table(pa.Table.from_pylist(table), aside)
            aside.replace(folder / name)
    return counts
