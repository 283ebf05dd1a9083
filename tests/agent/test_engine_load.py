"""The engine's figures of a batch: differences of sums, means and greatest values of what it was at."""

from __future__ import annotations

import pytest
from scripted_engine import MemorySearch, ScriptedEngine, byte_tokenizer, prompts

from search_r1.llm_agent.generation import GenerationConfig, LLMGenerationManager
from verl.agent.engine_load import SAMPLE_STEPS, EngineLoad
from verl.protocol import DataProto

TOKENIZER = byte_tokenizer()
CONFIG = GenerationConfig(
    max_turns=1, max_start_length=40, max_prompt_length=600, max_response_length=80, max_obs_length=200
)


class Figures:
    """An engine that has only figures: one dict per call of `stats`."""

    def __init__(self, *figures: dict[str, float]) -> None:
        self.figures = list(figures)

    def stats(self) -> dict[str, float]:
        return self.figures.pop(0)


def sums(generated: float, seconds: float, prefilled: float, hits: float) -> dict[str, float]:
    names = ("generated_tokens", "seconds", "prefilled_tokens", "prefix_hit_tokens")
    return dict(zip(names, (generated, seconds, prefilled, hits), strict=True))


def test_sums_are_those_of_the_batch_and_loads_are_seen_on_the_way():
    engine = Figures(
        sums(100, 2.0, 50, 50),
        {"running": 4, "kv_used_share": 0.5, "kv_bytes": 10},
        {"running": 2, "kv_used_share": 0.1, "kv_bytes": 30},
        sums(160, 5.0, 70, 130),
    )
    load = EngineLoad(engine)
    for step in range(1, SAMPLE_STEPS + 2):
        load.sample(step)
    assert load.metrics() == {
        "rollout/running/mean": 3.0,
        "rollout/running/max": 4.0,
        "rollout/kv_used_share/mean": pytest.approx(0.3),
        "rollout/kv_used_share/max": 0.5,
        "rollout/kv_bytes/max": 30.0,
        "rollout/generated_tokens": 60.0,
        "rollout/seconds": 3.0,
        "rollout/prefilled_tokens": 20.0,
        "rollout/prefix_hit_tokens": 80.0,
        "rollout/tokens_per_second": 20.0,
        "rollout/prefix_hit_share": 0.8,
    }


def batch_metrics(*texts: str) -> DataProto:
    script = ["<search>x</search>", "<answer>y</answer>"]
    engine = ScriptedEngine(TOKENIZER, lambda prompt, number: script[number])
    manager = LLMGenerationManager(TOKENIZER, engine, MemorySearch(), CONFIG)
    manager.run_llm_loop(prompts(TOKENIZER, ["earlier"]))
    return manager.run_llm_loop(prompts(TOKENIZER, list(texts)))


def test_a_batch_carries_its_engines_figures_and_those_of_several_processes_are_averaged():
    one = batch_metrics("a", "b")
    two = batch_metrics("a", "b", "c", "d")
    sampled = int(one.tensors["response_mask"].sum())
    assert one.meta_info["metrics"]["rollout/generated_tokens"] == sampled
    assert one.meta_info["metrics"]["rollout/running/max"] == 2.0
    joined = DataProto.concat([one, two]).meta_info["metrics"]
    assert joined["rollout/generated_tokens"] == 1.5 * sampled
    assert joined["rollout/running/max"] == 3.0
