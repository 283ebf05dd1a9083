"""TRL's GRPOTrainer with a search tool, for scripts/bench_grpo_step.py; runs in TRL's Python.

    python grpo_step_trl.py TASK.json        writes one JSON line a step to the task's `records`

`GRPOTrainer.train` is used as it is: its tool loop, its loss, its optimizer step. Like any user would, this
script passes it this model's protocol: a chat template for plain prompts and <information> blocks, a response
template that reads `<search> q</search>` as a call of the tool `search`, and the closing tags as
end-of-sequence tokens. If a vocabulary has no such words, they are stop strings. TRL passes no tokenizer to
`generate`, which stop strings need, and keeps the padding after them; both are mended here. The questions
come in the order of the file. The reward is exact match of the last <answer>.

If the task names a file with a reward of its own (`reward`), there are no searches: prompts are plain text,
and the file's `compute_score` scores the completions.
"""

from __future__ import annotations

import json
import re
import runpy
import string
import sys
import tempfile
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from statistics import mean
from typing import Any
from urllib.parse import urlsplit

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ message.content }}"
    "{% if message.tool_calls %}{% for call in message.tool_calls %}"
    "<search>{{ call.function.name }} {{ call.function.arguments | tojson }}</search>"
    "{% endfor %}{% endif %}"
    "{% endfor %}"
)
SEARCH_CALL = {
    "open": "<search>",
    "close": "</search>",
    "repeats": True,
    "content": "text",
    "transform": {
        "type": "function",
        "function": {"name": "search", "arguments": {"query": "{content}"}},
    },
}
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "\n",
    "fields": {"tool_calls": SEARCH_CALL, "content": {"close": "", "content": "text"}},
}


class SearchTool:
    """A search tool: one HTTP call a query, over a connection that stays open.

    Documents are cut to `longest` tokens.
    """

    def __init__(self, url: str, topk: int, tokenizer: Any, longest: int) -> None:
        address = urlsplit(url)
        self._topk = topk
        self._path = address.path
        self._tokenizer = tokenizer
        self._longest = longest
        self._connection = HTTPConnection(address.netloc, timeout=60)

    def search(self, query: str) -> str:
        """Look a query up.

        Args:
            query: what to look for.
        """
        body = json.dumps({"queries": [query], "topk": self._topk, "return_scores": True})
        self._connection.request("POST", self._path, body, {"Content-Type": "application/json"})
        lines = []
        for number, item in enumerate(json.load(self._connection.getresponse())["result"][0], start=1):
            title, _, text = item["document"]["contents"].partition("\n")
            lines.append(f"Doc {number}(Title: {title}) {text}\n")
        ids = self._tokenizer.encode("".join(lines).strip(), add_special_tokens=False)[: self._longest - 12]
        return f"\n\n<information>{self._tokenizer.decode(ids)}</information>\n\n"


class StepWriter(TrainerCallback):
    """A callback that writes the sizes of each step's trajectories when its optimizer step is done."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.sampled: list[int] = []
        self.contexts: list[int] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        line = {"sampled_tokens": mean(self.sampled), "context_tokens": mean(self.contexts)}
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self.sampled = []
        self.contexts = []
        return control


def exact_match(text: str, golden: list[str]) -> float:
    """Return 1.0 if the last answer is a golden one after SQuAD's normalisation, else 0.0."""

    def normalised(answer: str) -> str:
        letters = "".join(character for character in answer.lower() if character not in string.punctuation)
        return " ".join(re.sub(r"\b(a|an|the)\b", " ", letters).split())

    answers = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return float(bool(answers) and any(normalised(answers[-1]) == normalised(gold) for gold in golden))


def settings_of(task: dict[str, Any], folder: str, **more: Any) -> GRPOConfig:
    """Return TRL's settings of a task; `more` are further ones."""
    return GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=task["way"] != "float32",
        use_vllm=task["way"] == "vllm",
        vllm_mode="colocate",
        vllm_max_model_length=task["max_context"],
        seed=task["seed"],
        max_steps=task["steps"],
        per_device_train_batch_size=task["micro_batch"],
        gradient_accumulation_steps=task["prompts_per_step"] * task["group"] // task["micro_batch"],
        num_generations=task["group"],
        shuffle_dataset=False,
        max_completion_length=task["max_completion"],
        temperature=1.0,
        learning_rate=task["lr"],
        lr_scheduler_type="constant",
        weight_decay=0.0,
        adam_beta2=0.999,
        epsilon=task["clip"][0],
        epsilon_high=task["clip"][1],
        beta=0.0,
        loss_type="dapo",
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **more,
    )


def train_on_text(task: dict[str, Any], model: Any, tokenizer: Any) -> None:
    """Train without searches."""
    score = runpy.run_path(task["reward"])["compute_score"]
    writer = StepWriter(task["records"])

    def reward(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        for ids, prompt in zip(completion_ids, prompts, strict=True):
            writer.sampled.append(len(ids))
            writer.contexts.append(len(tokenizer.encode(prompt)) + len(ids))
        texts = tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
        return [score("text", text, None, None) for text in texts]

    rows = [{"prompt": row["prompt"]} for row in task["rows"]]
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=settings_of(task, folder),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[writer],
        )
        trainer.train()


def main(task: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    way = task["way"]
    max_new_tokens = task["max_response_length"]
    tokenizer = AutoTokenizer.from_pretrained(task["model"])
    dtype = torch.bfloat16 if way == "bfloat16" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(task["model"], dtype=dtype)
    if "reward" in task:
        return train_on_text(task, model, tokenizer)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.response_template = RESPONSE_TEMPLATE
    RESPONSE_TEMPLATE["fields"]["content"]["close"] = tokenizer.eos_token
    # A template's text gets no special tokens, but a model may expect one at the beginning of a text.
    begins = tokenizer.bos_token_id is not None and tokenizer("").input_ids == [tokenizer.bos_token_id]
    bos = tokenizer.bos_token if begins else ""
    stops = ["</search>", "</answer>"]
    no_word = (None, tokenizer.unk_token_id)
    closing = [id_ for id_ in tokenizer.convert_tokens_to_ids(stops) if id_ not in no_word]
    padding = [] if closing else [tokenizer.pad_token_id]
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *closing, *padding]
    if way == "vllm":
        generation = {"max_tokens": max_new_tokens, "stop": stops, "include_stop_str_in_output": True}
    else:
        generation = {"max_new_tokens": max_new_tokens}
        if not closing:
            model.generate = partial(model.generate, tokenizer=tokenizer, stop_strings=stops)
    writer = StepWriter(task["records"])
    search = SearchTool(task["url"], task["topk"], tokenizer, task["max_obs_length"])

    def reward(prompts: list[Any], completion_ids: list[list[int]], answers: list[Any], **_: Any) -> Any:
        for ids, prompt in zip(completion_ids, prompts, strict=True):
            prompt_ids = tokenizer.encode(prompt[0]["content"], add_special_tokens=False)
            writer.contexts.append(len(prompt_ids) + len(ids))
        texts = tokenizer.batch_decode(completion_ids)
        return [exact_match(text, golden) for text, golden in zip(texts, answers, strict=True)]

    rows = task["rows"]
    for row in rows:
        row["prompt"] = [{"role": "user", "content": bos + row["prompt"].removeprefix(bos)}]
    with tempfile.TemporaryDirectory() as folder:
        config = settings_of(
            task, folder, max_tool_calling_iterations=task["max_turns"], generation_kwargs=generation
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            tools=[search.search],
            callbacks=[writer],
        )
        generate = trainer._generate
        generate_turn = trainer._generate_single_turn

        def without_padding(*arguments: Any, **options: Any) -> Any:
            turns, log_probs = generate_turn(*arguments, **options)
            return [ids[:-1] if ids and ids[-1] in padding else ids for ids in turns], log_probs

        def noted(prompts: list[Any]) -> Any:
            output = generate(prompts)
            writer.sampled += [sum(mask) for mask in output[2]]
            return output

        trainer._generate = noted
        trainer._generate_single_turn = without_padding
        trainer.train()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
