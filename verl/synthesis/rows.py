"""The step from rollouts to rows that train: verified rollouts are demonstrations, the others are set aside.

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

from verl.utils.json_files import to_json, to_jsonable, write_lines

_SPACES = re.compile(r"\s+")


def segments_of(line: Mapping[str, Any], end_token: str | None) -> list[dict[str, Any]]:
    """Return a rollout as pieces of text, {text, trained}.

    The first piece is the prompt. Then pieces that the policy wrote (trained) alternate with pieces that it
    was given, by turns.

    Args:
        line: The line of the rollout.
        end_token: The end of sequence of the tokenizer, which training adds itself.
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
    """Return a rollout by messages as a conversation, [{role, content}, ...].

    The messages of its row come first, then those of its turns.
    """
    prompt_messages = (
        row["prompt"] if not isinstance(row["prompt"], str) else [{"role": "user", "content": row["prompt"]}]
    )
    marked = zip(line["token_mask"], line["tokens"], strict=True)
    turn_messages = [{"role": "assistant" if mask else "user", "content": text} for mask, text in marked]
    return [
        {"role": message["role"], "content": message["content"]}
        for message in (*prompt_messages, *turn_messages)
    ]


def choose(
    lines: Sequence[dict[str, Any]], keep: str, per_prompt: int, solved_at: float
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Choose the rollouts that train: of each example at most `per_prompt`, the best first.

    Of equally good rollouts the shorter one comes first. Two rollouts of one text count as one.

    Args:
        lines: The lines of the rollouts.
        keep: "passed" (a reward of `solved_at` or more), "best" (any known reward) or "all".
        per_prompt: Maximum number of rollouts of an example.
        solved_at: The reward from which a rollout has passed.

    Returns:
        (kept, rejected). Each rejected line has the reason in `rejected`.
    """
    kept: list[dict[str, Any]] = []
    rejected: list[dict[str, Any]] = []
    counts: dict[int, int] = {}
    texts: set[str] = set()

    def order(line: dict[str, Any]) -> tuple[Any, ...]:
        worth = float("-inf") if line["reward"] is None else line["reward"]
        return line["example_id"], -worth, line["completion_len"], line["rollout_idx"]

    for line in sorted(lines, key=order):
        text = _SPACES.sub(" ", line["prompt"] + line["completion"]).strip().lower()
        reason = ""
        if line["reward"] is None and keep != "all":
            reason = "unverified"
        elif keep == "passed" and line["reward"] < solved_at:
            reason = f"reward {line['reward']:g}"
        elif text in texts:
            reason = "a duplicate"
        elif counts.get(line["example_id"], 0) >= per_prompt:
            reason = f"the example has {per_prompt} already"
        if reason:
            rejected.append({**line, "rejected": reason})
            continue
        texts.add(text)
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
    """Write the files of kept and rejected rollouts.

    All kept rollouts of an example are in the same file, either sft_train or sft_val.

    Args:
        kept: The lines of rollouts that train.
        rejected: The lines of the others, with the reason in `rejected`.
        rows: The rows of the benchmark, by example_id.
        folder: The folder of the files.
        model: The name of the model that sampled the rollouts.
        end_token: The end of sequence of the tokenizer, which training adds itself.
        val_share: The share of examples that go to sft_val.
        seed: The seed of the choice of these examples.
        as_messages: Whether rollouts are conversations, whose rows have `messages` in place of `segments`.

    Returns:
        The number of rows of each file.

    Raises:
        ValueError: If no rollout is kept.
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
    prompts = [{**to_jsonable(rows[example]), "synthesized_by": model} for example in examples]
    counts = {"rejected.jsonl": len(rejected)}
    for name, table in {**demonstrations, "train.parquet": prompts}.items():
        counts[name] = len(table)
        (folder / name).unlink(missing_ok=True)
        if table:
            partial_file = folder / f"{name}.part"
            pq.write_table(pa.Table.from_pylist(table), partial_file)
            partial_file.replace(folder / name)
    return counts
