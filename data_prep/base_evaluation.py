"""How well a base model reads, and how well it searches already.

`reading_accuracy` looks at greedy copies with the right documents in sight; `evaluate` lets the model search
on a world with held-out names (sampled at temperature 1, and greedy), with an in-process BM25.
"""

from __future__ import annotations

import random
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from data_prep.demonstrations import Demonstrator, Retriever, observation
from data_prep.microworld import Question, World, draw_questions, evaluation_world
from data_prep.prompts import MICROWORLD_PROMPT, fill_prompt
from data_prep.relations import RELATIONS

READING_WORLD = 998
SEARCHING_WORLD = 999


def reading_cases(world: World, rng: random.Random, count: int) -> dict[str, list[tuple[list[str], str]]]:
    """(context segments, the words that must come next) for answers over 1 and 2 hops and for bridges."""
    student = Demonstrator(world, rng)
    cases: dict[str, list[tuple[list[str], str]]] = {"read1": [], "read2": [], "bridge": []}
    for hops in (1, 2):
        for question in draw_questions(rng, world, hops, count):
            prompt = fill_prompt(MICROWORLD_PROMPT, question.text)
            turns: list[str] = []
            for name in question.path:
                turns += [f"<search> {name}</search>", observation(student.retriever.search(name, 2))]
            cases[f"read{hops}"].append(([prompt, *turns, "<answer>"], f" {question.answer}</answer>"))
            if hops == 2:
                phrase = RELATIONS[question.relations[0]].phrases[0].format(e=question.path[0])
                context = [prompt, *turns[:2], f"<think> {phrase} is"]
                cases["bridge"].append((context, f" {question.path[1]}."))
    return cases


@torch.no_grad()
def reading_accuracy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, count: int = 96
) -> dict[str, float]:
    """Share of cases of which every token is the model's first choice. A world with held-out names."""
    rng = random.Random(0)
    result = {}
    for name, cases in reading_cases(evaluation_world(READING_WORLD)[1], rng, count).items():
        right = 0
        for begin in range(0, len(cases), 32):
            rows, starts = [], []
            for context, target in cases[begin : begin + 32]:
                ids = [i for part in tokenizer(context, add_special_tokens=False)["input_ids"] for i in part]
                starts.append(len(ids))
                rows.append(ids + tokenizer.encode(target, add_special_tokens=False))
            width = max(map(len, rows))
            padded = torch.tensor([row + [0] * (width - len(row)) for row in rows])
            best = model(input_ids=padded, use_cache=False).logits.argmax(-1)
            for k, (row, start) in enumerate(zip(rows, starts, strict=True)):
                right += best[k, start - 1 : len(row) - 1].tolist() == row[start:]
        result[name] = right / len(cases)
    return result


@torch.no_grad()
def rollouts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    retriever: Retriever,
    questions: list[Question],
    greedy: bool,
    max_turns: int = 3,
) -> list[tuple[list[str], str | None]]:
    """(queries, answer or None) for each question: the loop of a rollout in its plainest form."""
    contexts = [
        tokenizer.encode(fill_prompt(MICROWORLD_PROMPT, q.text), add_special_tokens=False) for q in questions
    ]
    stops = [tokenizer.convert_tokens_to_ids(t) for t in ("</search>", "</answer>", tokenizer.eos_token)]
    results: list[tuple[list[str], str | None]] = [([], None) for _ in questions]
    active = list(range(len(questions)))
    for turn in range(max_turns + 1):
        width = max((len(contexts[i]) for i in active), default=0)
        if not width:
            break
        pad = tokenizer.pad_token_id
        ids = torch.tensor([[pad] * (width - len(contexts[i])) + contexts[i] for i in active])
        mask = torch.tensor([[0] * (width - len(contexts[i])) + [1] * len(contexts[i]) for i in active])
        options = (
            {"do_sample": False}
            if greedy
            else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        )
        output = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=48,
            eos_token_id=stops,
            pad_token_id=pad,
            **options,
        )
        still = []
        for i, row in zip(active, output[:, width:].tolist(), strict=True):
            written = [t for t in row if t != pad]
            text = str(tokenizer.decode(written))
            queries, _ = results[i]
            if text.endswith("</answer>") and "<answer>" in text:
                results[i] = (queries, text.rsplit("<answer>", 1)[1].removesuffix("</answer>").strip())
            elif text.endswith("</search>") and "<search>" in text and turn < max_turns:
                queries.append(text.rsplit("<search>", 1)[1].removesuffix("</search>").strip())
                found = observation(retriever.search(queries[-1], 2))
                contexts[i] = contexts[i] + written + tokenizer.encode(found, add_special_tokens=False)
                still.append(i)
        active = still
    return results


def evaluate(model_dir: Path, seed: int = SEARCHING_WORLD, count: int = 200) -> dict[str, float]:
    """Reading accuracy; EM and searches by hops and mode; how often the right things are searched for."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    parts = evaluation_world(seed)
    retriever = Retriever(parts[0] | parts[1])
    rng = random.Random(seed)
    torch.manual_seed(seed)
    result = reading_accuracy(model, tokenizer)
    for hops in (1, 2, 3):
        questions = draw_questions(rng, parts[1], hops, count)
        for mode in ("sampled", "greedy"):
            done = rollouts(model, tokenizer, retriever, questions, greedy=mode == "greedy")
            key = f"{mode}_{hops}hop"
            pairs = list(zip(questions, done, strict=True))
            result[f"em_{key}"] = sum(answer == q.answer for q, (_, answer) in pairs) / count
            result[f"searches_{key}"] = sum(len(queries) for queries, _ in done) / count
            result[f"first_query_{key}"] = sum(q.path[0] in queries[:1] for q, (queries, _) in pairs) / count
            if hops == 2:
                result[f"bridge_query_{key}"] = sum(q.path[1] in queries for q, (queries, _) in pairs) / count
    return result
