"""256 environments that wait: this project's loop beside one with a turn barrier, trajectories per second.

    python scripts/bench_environments.py              wall seconds, Markdown

A step of an environment takes a lognormal time (mean 0.5 s, sigma 1), drawn by row and turn: the same in both
loops. Both have an equal engine, which writes 17 tokens a turn and takes 5 ms for a step of its whole batch,
and run environments by the same executor.

The barrier loop generates a turn of all trajectories under way, waits for all of their environments, and goes
on. It also starts the next rows as others end. There are two numbers of rows: one batch (no loop ends before
its slowest row), and four times as many. "threads" are environments with a plain `step`; in "async" ones,
`step` is a coroutine function.
"""

from __future__ import annotations

import asyncio
import sys
import time
from concurrent.futures import Future, wait
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "agent")]

import verl  # noqa: E402, F401  # isort: skip  (first: it says which Python has a missing package)
import numpy as np  # noqa: E402
from scripted_engine import ScriptedEngine, byte_tokenizer, prompts  # noqa: E402

from verl.agent.agent import EnvironmentAgent  # noqa: E402
from verl.agent.trajectory import AgentConfig  # noqa: E402
from verl.environments.environment import BaseTextEnv, BaseTextEnvStepOutput  # noqa: E402
from verl.environments.executors import Environments  # noqa: E402
from verl.environments.registry import register  # noqa: E402
from verl.protocol import object_array  # noqa: E402
from verl.sessions.engine_contract import Completion, SamplingParams  # noqa: E402

ENVIRONMENTS = 256
TURNS = 8
MEAN = 0.5
SIGMA = 1.0
TEXT = "I take a step..."
STEP_SECONDS = 0.005
MAX_TOKENS = 64


class Waiting(BaseTextEnv):
    """An environment that ends after as many turns as its row has delays."""

    def __init__(self, env_config: Any = None, extras: Any = None) -> None:
        super().__init__()
        self.delays: list[float] = list(extras["delays"])

    def step(self, action: str) -> BaseTextEnvStepOutput:
        time.sleep(self.delays.pop())
        messages = [{"role": "user", "content": "and then?\n"}] if self.delays else []
        return {"observations": messages, "reward": 1.0, "done": not messages, "metadata": {}}


class AsyncWaiting(Waiting):
    async def step(self, action: str) -> BaseTextEnvStepOutput:  # type: ignore[override]
        await asyncio.sleep(self.delays[-1])
        self.delays[-1] = 0.0
        return super().step(action)


class PacedEngine(ScriptedEngine):
    """An engine whose steps take STEP_SECONDS, however many sessions they serve."""

    def step(self) -> list[Completion]:
        started = time.perf_counter()
        completions = super().step()
        time.sleep(max(0.0, STEP_SECONDS - (time.perf_counter() - started)))
        return completions


def ours(agent: EnvironmentAgent, rows: list[dict[str, Any]]) -> int:
    """Run this project's loop; return how many trajectories ended well."""
    batch = prompts(agent.tokenizer, ["Go.\n"] * len(rows))
    batch.non_tensor_batch["episode"] = object_array(rows)
    records = agent.run_llm_loop(batch).non_tensor_batch["trajectory"]
    return sum(record["finish_reason"] == "done" for record in records)


def barrier(agent: EnvironmentAgent, rows: list[dict[str, Any]]) -> int:
    """Run the loop with a turn barrier; return how many trajectories ended."""
    engine = agent.engine
    codec = agent.codec
    runner = agent.environments[rows[0]["env_class"]]
    params = SamplingParams(max_tokens=MAX_TOKENS, eos_token_ids=codec.eos_token_ids)
    episodes: dict[int, Any] = {}
    num_started = num_ended = 0
    while num_ended < len(rows):
        while num_started < len(rows) and len(episodes) < (agent.config.max_in_flight or len(rows)):
            opened = runner.open(rows[num_started]["extras"], [], 0)
            episode = opened.result() if isinstance(opened, Future) else opened
            episodes[engine.open(codec.encode("Go.\n"), params)] = episode
            num_started += 1
        texts: dict[int, str] = {}
        while engine.has_runnable:
            texts |= {
                completion.session_id: codec.decode_turn(completion.token_ids) for completion in engine.step()
            }
        steps = runner.step_many([episodes[session] for session in texts], list(texts.values()))
        futures = [step for step in steps if isinstance(step, Future)]
        wait(futures)
        for session, output in zip(texts, [future.result() for future in futures], strict=True):
            if output["done"]:
                engine.close(session)
                runner.close(episodes.pop(session))
                num_ended += 1
            else:
                text = "".join(message["content"] for message in output["observations"])
                engine.resume(session, codec.observation_ids(text), params)
    return num_ended


def main() -> None:
    tokenizer = byte_tokenizer()
    config = AgentConfig(TURNS, 64, 4096, MAX_TOKENS, 64, max_in_flight=ENVIRONMENTS)
    register("threads", Waiting)
    register("async", AsyncWaiting)
    print("| rows | environments | loop | trajectories per s | times the barrier |\n|---|---|---|---|---|")
    for count, kind in product((ENVIRONMENTS, 4 * ENVIRONMENTS), ("threads", "async")):
        seconds: list[float] = []
        for loop in (barrier, ours):
            generator = np.random.default_rng(0)
            mu = np.log(MEAN) - SIGMA**2 / 2
            delays = generator.lognormal(mu, SIGMA, (count, TURNS)).tolist()
            rows = [{"env_class": kind, "prompt": [], "extras": {"delays": row}} for row in delays]
            engine = PacedEngine(tokenizer, lambda *_: TEXT)
            agent = EnvironmentAgent(tokenizer, engine, config, Environments())
            started = time.perf_counter()
            assert loop(agent, rows) == count
            seconds.append(time.perf_counter() - started)
            agent.close()
            ratio = seconds[0] / seconds[-1]
            print(f"| {count} | {kind} | {loop.__name__} | {count / seconds[-1]:.1f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
