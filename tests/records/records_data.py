"""A small finished step, as the trainer hands it to the recorder, and a tokenizer with split letters."""

import numpy as np
import torch

from verl.protocol import DataProto
from verl.trainer.ppo.validation import ValidationReport


class SplitTokenizer:
    """Every byte is a token, so a letter like "ä" is two tokens, neither of which is text alone."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(text.encode())

    def decode(self, ids, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        return bytes(ids).decode(errors="replace")


WRITTEN = "<search> Käse </search>"
SEEN = "\n\n<information>Doc 1(Title: Käse) </script><b>x</b></information>\n\n"
ANSWER = "<answer> {} </answer>"


def trajectory(answer: str) -> dict:
    start = len((WRITTEN + SEEN).encode())
    document = {"contents": '"Käse"\n</script><b>x</b>', "score": 1.5}
    return {
        "turns": [
            {
                "action": "search",
                "text": WRITTEN,
                "query": "Käse",
                "documents": [document],
                "error": None,
                "start": 0,
                "end": len(WRITTEN.encode()),
                "obs_start": len(WRITTEN.encode()),
                "obs_end": start,
                "search_seconds": 0.01,
            },
            {
                "action": "answer",
                "text": ANSWER.format(answer),
                "query": None,
                "documents": None,
                "error": None,
                "start": start,
                "end": start + len(ANSWER.format(answer).encode()),
                "obs_start": None,
                "obs_end": None,
                "search_seconds": None,
            },
        ],
        "num_searches": 1,
        "num_actions": 2,
        "num_valid_actions": 2,
        "finish_reason": "answer",
        "version_first": 0,
        "version_last": 0,
        "prompt_text": "Do as told.\nQuestion: Who made the cheese?\n",
        "policy_text": WRITTEN + "\n" + ANSWER.format(answer),
    }


def step_batch(answers: list[str], golden: str = "Ada") -> DataProto:
    """One row for each answer; right ones score 1."""
    texts = [(WRITTEN + SEEN + ANSWER.format(answer)).encode() for answer in answers]
    width = max(map(len, texts)) + 3
    seen = range(len(WRITTEN.encode()), len((WRITTEN + SEEN).encode()))
    responses = torch.zeros(len(texts), width, dtype=torch.long)
    mask = torch.zeros_like(responses)
    real = torch.zeros_like(responses)
    scores = torch.zeros(len(texts), width)
    for i, text in enumerate(texts):
        responses[i, : len(text)] = torch.tensor(list(text))
        real[i, : len(text)] = 1
        mask[i, : len(text)] = torch.tensor([int(t not in seen) for t in range(len(text))])
        scores[i, len(text) - 1] = float(answers[i] == golden)
    prompts = torch.ones(len(texts), 4, dtype=torch.long)
    return DataProto.from_dict(
        tensors={
            "prompts": prompts,
            "responses": responses,
            "response_mask": mask,
            "attention_mask": torch.cat([prompts, real], 1),
            "token_level_scores": scores,
        },
        non_tensors={
            "uid": [f"step1-{i}" for i in range(len(texts))],
            "data_source": ["cheese"] * len(texts),
            "reward_model": [{"ground_truth": {"target": np.array([golden])}}] * len(texts),
            "extra_info": [{"index": i, "hops": 1 + i % 2, "ids": np.arange(2)} for i in range(len(texts))],
            "trajectory": [trajectory(answer) for answer in answers],
            "em": np.array([float(answer == golden) for answer in answers], dtype=object),
        },
    )


def report(em: float, samples: DataProto | None = None) -> ValidationReport:
    """A validation of ten 1-hop and ten 2-hop questions in both modes, of which a share `em` is right."""
    rows = [
        {
            "score": float(i < em * 20),
            "em": float(i < em * 20),
            "f1": float(i < em * 20),
            "searches": 1 + i % 2,
            "env_class": "search",
            "hops": 1 + i % 2,
            "data_source": "cheese",
            "judged_by": "em",
            "finish_reason": "answer",
            "documents_hold_answer": 1.0,
            "first_query_right": None,
            "all_queries_right": None,
        }
        for i in range(20)
    ]
    return ValidationReport(rows={"greedy": rows, "sampled": rows[:10]}, samples=samples)
