"""A lock-step rollout in the manner of Search-R1's, on transformers' `generate`.

    for each turn: generate for all active rows (left padded) -> decode, cut behind the first closing tag
        -> one blocking search call for all of them -> encode the texts again and append -> next turn
    then one more generation whose search is not made

Written for the comparison from Search-R1's description: no stop strings, no state between turns, active mask.
"""

from __future__ import annotations

import json
import re
import urllib.request

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts.bench.search_rollout_task import (
    INFORMATION,
    Counts,
    Task,
    format_documents,
    measure,
    task_of_command_line,
)

ACTION = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)
HINT = (
    "\n\nThere was no action in this. To look something up, put a query between search tags; "
    "to finish, put the answer between answer tags.\n\n"
)


class LockStep:
    def __init__(self, task: Task) -> None:
        self.task = task
        self.tokenizer = AutoTokenizer.from_pretrained(task.model)
        self.model = AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32).eval()

    def run(self, prompts: list[str], seed: int) -> Counts:
        """One trajectory a prompt."""
        torch.manual_seed(seed)
        task = self.task
        contexts = [ids[-task.max_start_length :] for ids in self._encode(prompts)]
        active = list(range(len(prompts)))
        searches = kept = sampled = answers = 0
        for turn in range(task.max_turns + 1):
            is_last = turn == task.max_turns
            if not active:
                break
            outputs = self._generate([contexts[row] for row in active])
            sampled += sum(map(len, outputs))
            texts = [self._cut(text) for text in self._decode(outputs)]
            encoded = self._encode(texts)
            kept += sum(map(len, encoded))
            actions = [ACTION.search(text) for text in texts]
            for row, ids in zip(active, encoded, strict=True):
                contexts[row] = contexts[row] + ids
            answers += sum(action is not None and action[1] == "answer" for action in actions)
            if is_last:
                break
            asked = [
                (row, action[2].strip())
                for row, action in zip(active, actions, strict=True)
                if action is not None and action[1] == "search" and action[2].strip()
            ]
            done = {
                row
                for row, action in zip(active, actions, strict=True)
                if action is not None and action[1] == "answer"
            }
            found = dict(
                zip((row for row, _ in asked), self._search([query for _, query in asked]), strict=True)
            )
            searches += len(found)
            active = [row for row in active if row not in done]
            observations = [found.get(row, HINT) for row in active]
            for row, ids in zip(active, self._encode(observations), strict=True):
                contexts[row] = contexts[row] + ids[: task.max_obs_length]
            room = task.max_prompt_length - task.max_response_length
            active = [row for row in active if len(contexts[row]) <= room]
        return Counts(searches, kept, sampled, answers)

    @torch.no_grad()
    def _generate(self, contexts: list[list[int]]) -> list[list[int]]:
        """Sampled ids of each context, up to and without the end-of-sequence token."""
        pad = self.tokenizer.pad_token_id
        width = max(map(len, contexts))
        input_ids = torch.tensor([[pad] * (width - len(ids)) + ids for ids in contexts])
        mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in contexts])
        output = self.model.generate(
            input_ids=input_ids,
            attention_mask=mask,
            do_sample=True,
            temperature=self.task.temperature,
            top_k=0,
            top_p=1.0,
            max_new_tokens=self.task.max_response_length,
            pad_token_id=pad,
        )
        eos = self.tokenizer.eos_token_id
        rows = output[:, width:].tolist()
        return [row[: row.index(eos)] if eos in row else row for row in rows]

    def _decode(self, outputs: list[list[int]]) -> list[str]:
        return self.tokenizer.batch_decode(outputs, skip_special_tokens=True)

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return self.tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []

    @staticmethod
    def _cut(text: str) -> str:
        for tag in ("</search>", "</answer>"):
            if tag in text:
                return text.split(tag)[0] + tag
        return text

    def _search(self, queries: list[str]) -> list[str]:
        """The observation of each query, in one call."""
        if not queries:
            return []
        body = json.dumps({"queries": queries, "topk": self.task.topk, "return_scores": True}).encode()
        request = urllib.request.Request(self.task.url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as reply:
            results = json.load(reply)["result"]
        return [INFORMATION.format(format_documents(documents)) for documents in results]


def main(task: Task) -> None:
    torch.set_num_threads(1)
    measure(task, LockStep(task).run)


if __name__ == "__main__":
    main(task_of_command_line())
