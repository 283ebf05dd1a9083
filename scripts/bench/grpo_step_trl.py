"""TRL's GRPOTrainer with a search tool, for scripts/bench_grpo_step.py; runs in TRL's Python.

`GRPOTrainer.train` as it is: its tool loop (set up as in search_rollout_trl.py), its loss, its optimizer
step. The questions come in the order of the other contender, the reward is exact match of the last <answer>.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.grpo_step_task import (
    GROUP,
    GrpoTask,
    Steps,
    exact_match,
    last_answer,
    task_of_command_line,
)
from scripts.bench.search_rollout_task import Task
from scripts.bench.search_rollout_trl import CHAT_TEMPLATE, RESPONSE_TEMPLATE, Tool


class Watch(TrainerCallback):
    """Notes each optimizer step, and ends the run when its time is over."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self.scores: list[float] = []
        self.sampled: list[int] = []
        self.contexts: list[int] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        def mean(values: list[Any]) -> float:
            return sum(values) / max(len(values), 1)

        self.steps.add(mean(self.scores), mean(self.sampled), mean(self.contexts))
        self.scores, self.sampled, self.contexts = [], [], []
        control.should_training_stop = control.should_training_stop or self.steps.is_over
        return control

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        self.steps.start()
        return control


def main(task: GrpoTask) -> None:
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(task.model)
    model = AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32)
    tokenizer.chat_template, tokenizer.response_template = CHAT_TEMPLATE, RESPONSE_TEMPLATE
    closing = tokenizer.convert_tokens_to_ids(["</search>", "</answer>"])
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *closing]
    watch = Watch(Steps(task))
    searched = Task(model=task.model, url=task.url, warm_up=[], prompts=[], seed=task.seed, topk=task.topk)

    def reward(
        prompts: list[Any], completion_ids: list[list[int]], answers: list[list[str]], **_: Any
    ) -> Any:
        texts = tokenizer.batch_decode(completion_ids)
        scores = [exact_match(last_answer(text), golden) for text, golden in zip(texts, answers, strict=True)]
        watch.scores += scores
        watch.contexts += [
            len(ids) + len(tokenizer.encode(prompt[0]["content"]))
            for ids, prompt in zip(completion_ids, prompts, strict=True)
        ]
        return scores

    rows_per_step = task.prompts_per_step * GROUP
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=GRPOConfig(
                output_dir=folder,
                use_cpu=True,
                bf16=False,
                seed=task.seed,
                max_steps=task.num_steps,
                per_device_train_batch_size=task.trl_micro_batch,
                gradient_accumulation_steps=rows_per_step // task.trl_micro_batch,
                num_generations=GROUP,
                shuffle_dataset=False,
                max_completion_length=task.max_prompt_length - task.max_start_length,
                max_tool_calling_iterations=task.max_turns,
                generation_kwargs={"max_new_tokens": task.max_response_length},
                temperature=task.temperature,
                learning_rate=task.lr,
                lr_scheduler_type="constant",
                weight_decay=0.0,
                adam_beta2=0.999,
                epsilon=0.2,
                beta=0.0,
                loss_type="dapo",
                gradient_checkpointing=False,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list(
                [
                    {"prompt": [{"role": "user", "content": row.prompt}], "answers": row.answers}
                    for row in task.rows
                ]
            ),
            processing_class=tokenizer,
            tools=[Tool(searched).search],
            callbacks=[watch],
        )
        generate = trainer._generate

        def noted(prompts: list[Any]) -> Any:
            output = generate(prompts)
            watch.sampled += [sum(mask) for mask in output[2]]
            return output

        trainer._generate = noted
        trainer.train()
        trainer.model.save_pretrained(task.final_model)
        AutoTokenizer.from_pretrained(task.model).save_pretrained(task.final_model)


if __name__ == "__main__":
    main(task_of_command_line())
