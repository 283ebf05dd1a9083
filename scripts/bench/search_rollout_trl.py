"""TRL's GRPOTrainer with a search tool, for scripts/bench_search_rollout.py; runs in TRL's Python.

Its own loop generates (transformers `generate`), parses tool calls, runs them and generates again. It is
given this model's protocol as any user would: a chat template that writes plain prompts and <information>
blocks, a response template that reads `<search> q</search>` as a call of the tool `search`, and the closing
tags as end-of-sequence tokens. So prompts, observations and stops are those of the others. The tool is an
ordinary function with one connection that stays open: TRL waits for the calls of one trajectory before it
makes those of the next, also if the tool is asynchronous, which only costs it more.
"""

from __future__ import annotations

import json
import sys
import tempfile
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.search_rollout_task import (
    INFORMATION,
    Counts,
    Task,
    format_documents,
    measure,
    task_of_command_line,
)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ message.content }}"
    "{% if message.tool_calls %}{% for call in message.tool_calls %}"
    "<search>{{ call.function.name }} {{ call.function.arguments | tojson }}</search>"
    "{% endfor %}{% endif %}"
    "{% endfor %}"
)
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "\n",
    "fields": {
        "tool_calls": {
            "open": "<search>",
            "close": "</search>",
            "repeats": True,
            "content": "text",
            "transform": {
                "type": "function",
                "function": {"name": "search", "arguments": {"query": "{content}"}},
            },
        },
        "content": {"close": "<|endoftext|>", "content": "text"},
    },
}


class Tool:
    """The search tool: one HTTP call a query."""

    def __init__(self, task: Task) -> None:
        self.task, self.num_searches = task, 0
        address = urlsplit(task.url)
        self._path, self._connection = address.path, HTTPConnection(address.netloc, timeout=60)

    def search(self, query: str) -> str:
        """Looks a query up.

        Args:
            query: what to look for.
        """
        body = json.dumps({"queries": [query], "topk": self.task.topk, "return_scores": True})
        self._connection.request("POST", self._path, body, {"Content-Type": "application/json"})
        reply = json.load(self._connection.getresponse())
        self.num_searches += 1
        return INFORMATION.format(format_documents(reply["result"][0]))


def make_trainer(task: Task, folder: str) -> tuple[GRPOTrainer, Tool]:
    tokenizer = AutoTokenizer.from_pretrained(task.model)
    model = AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32)
    tokenizer.chat_template, tokenizer.response_template = CHAT_TEMPLATE, RESPONSE_TEMPLATE
    closing = tokenizer.convert_tokens_to_ids(["</search>", "</answer>"])
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *closing]
    tool = Tool(task)
    config = GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=8,
        num_generations=8,
        max_completion_length=task.max_prompt_length - task.max_start_length,
        max_tool_calling_iterations=task.max_turns,
        generation_kwargs={"max_new_tokens": task.max_response_length},
        temperature=task.temperature,
        gradient_checkpointing=False,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "none"}]}]),
        processing_class=tokenizer,
        tools=[tool.search],
    )
    return trainer, tool


def main(task: Task) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        trainer, tool = make_trainer(task, folder)

        def run(prompts: list[str], seed: int) -> Counts:
            torch.manual_seed(seed)
            tool.num_searches = 0
            # What `_generate_and_score_completions` sets up before it calls `_generate`.
            trainer._sync_tool_dicts = [{"search": tool.search}] * len(prompts)
            trainer._async_tool_dicts = [{}] * len(prompts)
            output = trainer._generate([[{"role": "user", "content": text}] for text in prompts])
            completion_ids, masks = output[1], output[2]
            answer_end = trainer.processing_class.convert_tokens_to_ids("</answer>")
            sampled = sum(map(sum, masks))
            return Counts(
                searches=tool.num_searches,
                kept_tokens=sampled,
                sampled_tokens=sampled,
                answers=sum(ids[-1] == answer_end for ids in completion_ids if ids),
            )

        measure(task, run)


if __name__ == "__main__":
    main(task_of_command_line())
