"""One rollout engine in a process of its own, for `scripts/bench_rollout.py`: JSON lines in, JSON lines out.

    python rollout_worker.py ENGINE MODEL_DIR DTYPE MAX_SEQUENCES MAX_MODEL_LEN
    stdin   {"prompts": [[ids]], "lengths": [n], "seed": s}
    stdout  {"tokens": useful tokens, "cpu_seconds": of all threads, "wall_seconds": ..., "note": "..."}

Runs in another project's environment too (vLLM's): imports nothing of ours but for the engine `native`.
Everything else that is printed goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Protocol

Lists = list[list[int]]


class Engine(Protocol):
    """`run` samples lengths[i] tokens for prompt i at temperature 1, with log-probs unless `note` says so."""

    note: str

    def run(self, prompts: Lists, lengths: list[int], seed: int) -> int:
        """Returns the number of tokens sampled for their owners."""


class Native:
    """This project's engine."""

    note = "log-probs"

    def __init__(self, model_dir: str, dtype: str, max_sequences: int, max_model_len: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        sys.path.insert(0, str(Path(__file__).parents[2]))
        from verl.workers.rollout.native import NativeEngine

        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype))
        self._engine = NativeEngine(model.config, max_sequences, max_model_len, dtype=getattr(torch, dtype))
        self._engine.update_weights(model.named_parameters(), version=0)

    def run(self, prompts: Lists, lengths: list[int], seed: int) -> int:
        from verl.workers.rollout.engine import SamplingParams

        engine, num_tokens = self._engine, 0
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            engine.open(prompt, SamplingParams(length, seed=seed + i))
        while engine.has_runnable:
            for completion in engine.step():
                assert len(completion.log_probs) == len(completion.token_ids)
                num_tokens += len(completion.token_ids)
                engine.close(completion.session_id)
        return num_tokens


class Ceiling:
    """The native engine's packed matrix products alone, for the rows that the same work needs: no engine that
    computes each token once can be faster. Prompts in one pass, then a row per sequence that is not done."""

    note = "matrix products only"

    def __init__(self, model_dir: str, dtype: str, max_sequences: int, max_model_len: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        sys.path.insert(0, str(Path(__file__).parents[2]))
        from verl.workers.rollout.native.cpu_model import Product

        self._dtype = getattr(torch, dtype)
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=self._dtype).eval()
        params = {name: parameter.detach() for name, parameter in model.named_parameters()}
        self._products = []
        joined = [("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("self_attn.o_proj",)]
        joined += [("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",)]
        for layer in range(model.config.num_hidden_layers):
            for names in joined:
                weight = torch.cat([params[f"model.layers.{layer}.{name}.weight"] for name in names])
                self._products.append((Product(weight, None), weight.shape[1]))
        head = model.get_output_embeddings().weight.detach()
        self._head = (Product(head, None), head.shape[1])

    def run(self, prompts: Lists, lengths: list[int], seed: int) -> int:
        import torch

        from verl.workers.rollout.native.cpu_model import padded

        steps = [(sum(map(len, prompts)), len(prompts))]
        for number in range(1, max(lengths)):
            active = sum(length > number for length in lengths)
            steps.append((active, active))
        with torch.inference_mode():
            for rows, out_rows in steps:
                sizes = [(rows, *product) for product in self._products] + [(out_rows, *self._head)]
                inputs = {
                    (count, width): torch.ones(padded(count), width, dtype=self._dtype)
                    for count, _, width in sizes
                }
                for count, product, width in sizes:
                    product(inputs[count, width])
        return sum(lengths)


class Vllm:
    """vLLM in this process, eager, continuous batching."""

    note = "log-probs"

    def __init__(self, model_dir: str, dtype: str, max_sequences: int, max_model_len: int) -> None:
        from vllm import LLM

        self._llm = LLM(
            model_dir,
            skip_tokenizer_init=True,
            dtype=dtype,
            max_num_seqs=max_sequences,
            max_model_len=max_model_len,
            max_num_batched_tokens=8192,
            block_size=32,
            enforce_eager=True,
            disable_log_stats=True,
        )

    def run(self, prompts: Lists, lengths: list[int], seed: int) -> int:
        from vllm import SamplingParams

        params = [
            SamplingParams(temperature=1.0, max_tokens=n, ignore_eos=True, logprobs=0, detokenize=False)
            for n in lengths
        ]
        outputs = self._llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        assert all(len(o.outputs[0].logprobs) == len(o.outputs[0].token_ids) for o in outputs)
        return sum(len(output.outputs[0].token_ids) for output in outputs)


class Generate:
    """transformers' generate: one batch, padded left, until the longest is done; no log-probs.

    The first run tries the dynamic and the static cache and keeps the faster one.
    """

    def __init__(self, model_dir: str, dtype: str, max_sequences: int, max_model_len: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype)).eval()
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = 0
        self._cache: str | None = None
        self.note = ""

    def run(self, prompts: Lists, lengths: list[int], seed: int) -> int:
        if self._cache is None:
            seconds = {}
            for cache in ("dynamic", "static"):
                start = time.process_time()
                self._generate(prompts, lengths, seed, cache)
                seconds[cache] = time.process_time() - start
            self._cache = min(seconds, key=lambda cache: seconds[cache])
            self.note = f"no log-probs, {self._cache} cache"
        self._generate(prompts, lengths, seed, self._cache)
        return sum(lengths)

    def _generate(self, prompts: Lists, lengths: list[int], seed: int, cache: str) -> None:
        import torch

        torch.manual_seed(seed)
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        self._model.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=max(lengths),
            cache_implementation=cache,
            disable_compile=True,
        )


ENGINES = {"native": Native, "ceiling": Ceiling, "vllm": Vllm, "generate": Generate}


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what engines print must not stand among the replies
    name, model_dir, dtype, max_sequences, max_model_len = sys.argv[1:]
    import torch

    torch.set_num_threads(1)
    engine: Engine = ENGINES[name](model_dir, dtype, int(max_sequences), int(max_model_len))
    _send(replies, {"ready": name})
    for line in sys.stdin:
        request = json.loads(line)
        wall, cpu = time.perf_counter(), time.process_time()
        tokens = engine.run(request["prompts"], request["lengths"], request["seed"])
        cpu_seconds, wall_seconds = time.process_time() - cpu, time.perf_counter() - wall
        _send(
            replies,
            {"tokens": tokens, "cpu_seconds": cpu_seconds, "wall_seconds": wall_seconds, "note": engine.note},
        )


def _send(replies: Any, message: dict[str, Any]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
