"""This project's rollout as a contender of scripts/bench_search_rollout.py."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts.bench.search_rollout_task import Counts, Task, measure, task_of_command_line
from search_r1.llm_agent.generation import GenerationConfig, LLMGenerationManager
from search_r1.search.client import SearchClient
from verl.protocol import DataProto, object_array
from verl.trainer.ppo.batching import TRAIN_STREAM, sampling_seeds
from verl.workers.rollout.native import NativeEngine


def main(task: Task) -> None:
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(task.model)
    model = AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32)
    config = GenerationConfig(
        max_turns=task.max_turns,
        max_start_length=task.max_start_length,
        max_prompt_length=task.max_prompt_length,
        max_response_length=task.max_response_length,
        max_obs_length=task.max_obs_length,
        topk=task.topk,
        temperature=task.temperature,
    )
    engine = NativeEngine(model.config, max_num_seqs=len(task.prompts), max_model_len=task.max_prompt_length)
    engine.update_weights(model.named_parameters(), 0)
    manager = LLMGenerationManager(tokenizer, engine, SearchClient(task.url, timeout=60), config)

    def run(prompts: list[str], seed: int) -> Counts:
        gen_batch = DataProto.from_dict(
            tensors={"sampling_seeds": sampling_seeds(seed, TRAIN_STREAM, 1, len(prompts))},
            non_tensors={"raw_prompt_ids": object_array([tokenizer.encode(p) for p in prompts])},
        )
        output = manager.run_llm_loop(gen_batch)
        records = output.non_tensor_batch["trajectory"]
        sampled = int(output.tensors["response_mask"].sum())
        return Counts(
            searches=sum(record["num_searches"] for record in records),
            kept_tokens=sampled,
            sampled_tokens=sampled,
            answers=sum(record["finish_reason"] == "answer" for record in records),
        )

    measure(task, run)
    manager.close()
    engine.shutdown()


if __name__ == "__main__":
    main(task_of_command_line())
