"""An engine whose model vLLM splits over two processes beside one with the whole model: the same tokens.

    python split_process.py FOLDER     prints "the same"

It has a process of its own: an engine in a process changes vLLM's global state there when it starts others.
"""

import sys
from pathlib import Path

import pytest
from vllm_models import KV_BYTES, generate, make_model, random_prompts, write_config

from verl.sessions.engine_contract import SamplingParams
from verl.workers.rollout.vllm.colocated_engine import VllmEngine


def main() -> None:
    folder = write_config("two-heads", Path(sys.argv[1]))
    sizes = {"max_num_seqs": 16, "max_model_len": 128}
    whole = VllmEngine(folder, kv_cache_memory_bytes=KV_BYTES, **sizes)
    split = VllmEngine(
        folder, tensor_parallel_size=2, worker_processes=True, kv_cache_memory_bytes=KV_BYTES // 2, **sizes
    )
    try:
        prompts = random_prompts(12, seed=7)
        params = [SamplingParams(10, seed=seed, temperature=1.2, top_k=20) for seed in range(12)]
        for version in (1, 2):
            model = make_model("two-heads", seed=version)
            for engine in (whole, split):
                engine.load_weights(model.named_parameters(), version)
            expected = generate(whole, prompts, params)
            completions = generate(split, prompts, params)
            assert [c.token_ids for c in completions] == [c.token_ids for c in expected]
            for one, other in zip(completions, expected, strict=True):
                assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4)
                assert one.model_log_probs == pytest.approx(other.model_log_probs, abs=1e-4)
                assert one.version_first == version
        with pytest.raises(ValueError, match="missing weights"):
            split.load_weights([], 3)
    finally:
        split.shutdown()
        whole.shutdown()
    assert not list(Path("/dev/shm").glob("rollout-weights-*"))
    print("the same")


if __name__ == "__main__":
    main()
