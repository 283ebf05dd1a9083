"""How well a base model reads, and how well it searches already.

`reading_accuracy` looks at greedy copies with the right documents in sight; `evaluate` lets the model search
on a world with held-out names, by the code that validates in training: engine, agent, reward.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from data_prep.demonstrations import PLAIN, PROTOCOL, Demonstrator
from data_prep.microworld import World, draw_questions, evaluation_world, write_world
from data_prep.prompts import MICROWORLD_PROMPT, fill_prompt
from data_prep.relations import RELATIONS
from search_r1.llm_agent.generation import GenerationConfig, LLMGenerationManager
from search_r1.search.bm25 import BM25Retriever
from search_r1.search.corpus import Corpus
from verl.trainer.ppo.validation import validate
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.workers.reward_manager import RewardManager
from verl.workers.rollout.native import NativeEngine

LENGTHS = {"max_start_length": 64, "max_prompt_length": 768}
READING_WORLD = 998
SEARCHING_WORLD = 999


def reading_cases(
    world: World, rng: random.Random, count: int, tagged: bool = True
) -> dict[str, list[tuple[list[str], str]]]:
    """(context segments, the words that must come next) for answers over 1 and 2 hops and for bridges."""
    student = Demonstrator(world, rng, wording=PROTOCOL if tagged else PLAIN)
    (answer, answer_end), note = student.wording.answer.split(" {}"), student.wording.note.split("{}")[0]
    cases: dict[str, list[tuple[list[str], str]]] = {"read1": [], "read2": [], "bridge": []}
    for hops in (1, 2):
        for question in draw_questions(rng, world, hops, count):
            prompt = fill_prompt(MICROWORLD_PROMPT, question.text)
            turns: list[str] = []
            for name in question.path:
                query = [f"<search> {name}</search>"] if tagged else []
                turns += [*query, student.wording.observation(student.retriever.search(name, 2))]
            cases[f"read{hops}"].append(([prompt, *turns, answer], f" {question.answer}{answer_end}"))
            if hops == 2:
                phrase = RELATIONS[question.relations[0]].phrases[0].format(e=question.path[0])
                context = [prompt, *turns[: len(query) + 1], f"{note}{phrase} is"]
                cases["bridge"].append((context, f" {question.path[1]}."))
    return cases


@torch.no_grad()
def reading_accuracy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, count: int = 96, tagged: bool = True
) -> dict[str, float]:
    """Share of cases of which every token is the model's first choice. A world with held-out names.

    `tagged`: in the words of the protocol; without, as a plain base model was pretrained.
    """
    rng = random.Random(0)
    result = {}
    for name, cases in reading_cases(evaluation_world(READING_WORLD)[1], rng, count, tagged).items():
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


class InProcessSearch:
    """Stands where a `SearchClient` does, with the server's BM25 in this process."""

    def __init__(self, corpus: Corpus) -> None:
        self.retriever = BM25Retriever(corpus)

    def submit(self, queries: Sequence[str], topk: int) -> list[Future]:
        results, scores = self.retriever.batch_search(list(queries), topk)
        futures: list[Future] = [Future() for _ in queries]
        for future, documents, values in zip(futures, results, scores, strict=True):
            future.set_result(
                [{"contents": d.contents, "score": s} for d, s in zip(documents, values, strict=True)]
            )
        return futures

    def statistics(self) -> dict[str, float]:
        return {}


def evaluate(
    model_dir: Path | str, seed: int = SEARCHING_WORLD, count: int = 200, tagged: bool = True
) -> dict[str, float]:
    """Reading accuracy, and what training prints: its own validation on a world that training never sees.

    Args:
        model_dir: Hugging Face folder.
        seed: of the world, and of the sampled mode.
        count: questions of each number of hops; those of 3 hops bear the prefix `val_extra/`.
        tagged: how reading accuracy is asked for, see `reading_accuracy`; a search always needs the tags.
    """
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    engine = NativeEngine(model.config, max_num_seqs=128, max_model_len=LENGTHS["max_prompt_length"])
    engine.load_weights(model.named_parameters(), 0)
    config = GenerationConfig(max_turns=3, max_response_length=32, max_obs_length=250, topk=2, **LENGTHS)
    reward = RewardManager(tokenizer)
    columns = {"prompt_key": "prompt", "truncation": "error", "return_raw_chat": False, **LENGTHS}
    with tempfile.TemporaryDirectory() as folder:
        world = Path(folder)
        write_world(seed, world, num_train=2, num_test=2 * count, num_3hop=count)
        search = InProcessSearch(Corpus.open(world / "corpus.jsonl"))
        agent = LLMGenerationManager(tokenizer, engine, search, config)
        reports = [
            validate(
                agent.run_llm_loop,
                reward,
                RLHFDataset(str(world / name), tokenizer, columns),
                ["sampled", "greedy"],
                None,
                seed,
            )
            for name in ("test.parquet", "test_3hop.parquet")
        ]
    reports[0].extra = reports[1]
    return reading_accuracy(model, tokenizer, tagged=tagged) | reports[0].metrics()
