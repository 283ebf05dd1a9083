"""TRL's GRPOTrainer as a contender of scripts/bench_update.py; runs in TRL's Python.

`GRPOTrainer.compute_loss` on inputs as its own `_generate_and_score_completions` prepares them: prompts
padded on the left, completions on the right, retrieved tokens 0 in `tool_mask`, every micro-batch as wide as
the longest trajectory of the step. With `sorts_by_length`, which TRL has not, rows of like length stand
together and each micro-batch is cut to its own longest.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.update_task import UpdateTask, adamw, micro_batch_rows, run_contender  # noqa: E402


def prepared(batch: dict[str, Tensor], rows: list[int], is_cut: bool, num_tokens: Tensor) -> dict[str, Any]:
    """A micro-batch as TRL's `compute_loss` takes it."""
    prompts = batch["prompt_lengths"]
    completions = batch["attention_mask"].sum(1) - prompts
    widths = [int((x[rows] if is_cut else x).max()) for x in (prompts, completions)]
    parts: dict[str, Any] = {
        "prompt_ids": torch.zeros(len(rows), widths[0], dtype=torch.int64),
        "completion_ids": torch.zeros(len(rows), widths[1], dtype=torch.int64),
    }
    for name in ("prompt_mask", "completion_mask", "tool_mask"):
        parts[name] = torch.zeros_like(parts["prompt_ids" if name[0] == "p" else "completion_ids"])
    for i, row in enumerate(rows):
        prompt, end = int(prompts[row]), int(prompts[row] + completions[row])
        parts["prompt_ids"][i, widths[0] - prompt :] = batch["input_ids"][row, :prompt]
        parts["prompt_mask"][i, widths[0] - prompt :] = 1
        parts["completion_ids"][i, : end - prompt] = batch["input_ids"][row, prompt:end]
        parts["completion_mask"][i, : end - prompt] = 1
        parts["tool_mask"][i, : end - prompt] = batch["response_mask"][row, prompt:end]
    return parts | {"advantages": batch["advantages"][rows], "num_items_in_batch": num_tokens}


class TrlStep:
    def __init__(self, task: UpdateTask, batch: dict[str, Tensor]) -> None:
        self.task = task
        self.model = AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32)
        self.folder = tempfile.TemporaryDirectory()
        micro_batches = micro_batch_rows(task, batch)
        num_tokens = batch["response_mask"].sum()
        self.inputs = [prepared(batch, rows, task.sorts_by_length, num_tokens) for rows in micro_batches]
        self.processed_tokens = sum(
            part["prompt_ids"].numel() + part["completion_ids"].numel() for part in self.inputs
        )
        self.trainer = GRPOTrainer(
            model=self.model,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=GRPOConfig(
                output_dir=self.folder.name,
                use_cpu=True,
                bf16=False,
                per_device_train_batch_size=task.micro_batch,
                gradient_accumulation_steps=len(micro_batches),
                steps_per_generation=len(micro_batches),
                num_generations=2 if task.micro_batch * len(micro_batches) % 2 == 0 else 1,
                loss_type="dapo",  # the mean over all sampled tokens of the step
                epsilon=0.2,
                beta=0.0,
                temperature=1.0,
                gradient_checkpointing=False,
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list([{"prompt": "none"}]),
            processing_class=PreTrainedTokenizerFast.from_pretrained(task.model),
        )
        self.trainer.current_gradient_accumulation_steps = len(micro_batches)
        self.model.train()
        self.optimizer = adamw(task, self.model)

    def accumulate(self) -> float:
        total = 0.0
        for part in self.inputs:
            loss = self.trainer.compute_loss(self.model, part)
            loss.backward()
            total += float(loss.detach())
        return total

    def apply(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.task.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


if __name__ == "__main__":
    run_contender(TrlStep)
