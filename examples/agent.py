"""Run the agent loop without a trainer: a model searches and answers, and a mask marks what it wrote itself.

bash retrieval_launch.sh &
python examples/agent.py "What is the birthplace of the director of Sleeping Hotel?"
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from data_prep.prompts import MICROWORLD_PROMPT
from search_r1.llm_agent.generation import GenerationConfig, LLMGenerationManager
from verl.protocol import DataProto, object_array
from verl.workers.rollout.native import NativeEngine


def ask(question: str, model_folder: str, url: str = "http://127.0.0.1:8000/retrieve") -> DataProto:
    """Return one trajectory as training sees it.

    The batch holds `responses`, `response_mask` (1 for a sampled token), `rollout_log_probs` and more.
    """
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    engine = NativeEngine(model.config, 1, 1024, torch.float32, "cpu")
    engine.load_weights(model.state_dict().items(), version=0)
    config = GenerationConfig(3, 200, 1000, 64, 200, search_url=url, temperature=0.0)
    manager = LLMGenerationManager(tokenizer, engine, None, config)
    ids = object_array([tokenizer.encode(MICROWORLD_PROMPT.format(question=question))])
    prompts = DataProto.from_dict({"sampling_seeds": torch.tensor([0])}, {"raw_prompt_ids": ids})
    try:
        return manager.run_llm_loop(prompts)
    finally:
        manager.close()


if __name__ == "__main__":
    for turn in ask(sys.argv[1], "data_prep/base_model").non_tensor_batch["trajectory"][0]["turns"]:
        print(turn["text"], [document["contents"] for document in turn["documents"] or []])
