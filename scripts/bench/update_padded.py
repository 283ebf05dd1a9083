"""A padded Hugging Face step as a contender of scripts/bench_update.py: what one writes first.

The model with its own attention (sdpa) on rows padded to the longest, logits of all tokens, log_softmax,
the clipped loss of the sampled tokens, one gradient for all micro-batches.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.update_task import UpdateTask, adamw, micro_batch_rows, run_contender  # noqa: E402


class PaddedStep:
    def __init__(self, task: UpdateTask, batch: dict[str, Tensor]) -> None:
        self.task, self.batch = task, batch
        self.model = AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32).train()
        self.optimizer = adamw(task, self.model)
        self.processed_tokens = 0

    def accumulate(self) -> float:
        self.processed_tokens, total = 0, 0.0
        num_tokens = int(self.batch["response_mask"].sum())
        for rows in micro_batch_rows(self.task, self.batch):
            part = {key: value[rows] for key, value in self.batch.items()}
            width = (
                int(part["attention_mask"].sum(1).max())
                if self.task.sorts_by_length
                else part["input_ids"].shape[1]
            )
            ids, attention, mask = (
                part[key][:, :width] for key in ("input_ids", "attention_mask", "response_mask")
            )
            logits = self.model(input_ids=ids, attention_mask=attention, use_cache=False).logits
            log_probs = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
            ratio = (log_probs - log_probs.detach()).exp()
            advantages = part["advantages"][:, None]
            per_token = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
            loss = (per_token * mask[:, 1:]).sum() / num_tokens
            loss.backward()
            total += float(loss.detach())
            self.processed_tokens += ids.numel()
        return total

    def apply(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.task.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


if __name__ == "__main__":
    run_contender(PaddedStep)
