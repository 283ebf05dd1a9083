"""Tokens per second through `python -m verl.inference`, over those of the engine alone.

    python -m verl.inference --model data_prep/base_model --max_num_seqs 64
    python scripts/bench_inference.py http://127.0.0.1:8001

64 sessions of two turns of 256 tokens; both sides by turns, 5 times after a warm-up; the ratio of medians.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import verl  # noqa: E402, F401  # isort: skip  (first: it says which Python has what is missing)
import httpx  # noqa: E402

from verl.inference.weights import read_weights  # noqa: E402
from verl.workers.engine.loading import load_hf_config  # noqa: E402
from verl.workers.rollout.base import SamplingParams  # noqa: E402
from verl.workers.rollout.native import NativeEngine  # noqa: E402

MODEL, SESSIONS, TOKENS, ROUNDS = ROOT / "data_prep" / "base_model", 64, 256, 5


def alone(engine: NativeEngine) -> None:
    params = [SamplingParams(TOKENS, seed=number, ignore_eos=True) for number in range(SESSIONS)]
    turns = {engine.open([359, 25, 546, 2199, number], params[number]): 1 for number in range(SESSIONS)}
    while turns:
        for ended in engine.step():
            if turns.pop(ended.session_id) == 1:
                turns[ended.session_id] = 2
                engine.resume(ended.session_id, [25] * 20, params[0])
            else:
                engine.close(ended.session_id)


async def through(url: str) -> None:
    async def play(client: httpx.AsyncClient, number: int) -> None:
        base = (await client.post(f"{url}/sessions")).json()["base_url"]
        messages = [{"role": "user", "content": f"Question: {number}"}]
        for _ in range(2):
            body = {"messages": messages, "max_tokens": TOKENS, "ignore_eos": True}
            reply = (await client.post(f"{base}/chat/completions", json=body)).json()
            messages += [reply["choices"][0]["message"], {"role": "user", "content": ":" * 20}]
        await client.delete(base.removesuffix("/v1"))

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=600, limits=limits) as client:
        await asyncio.gather(*(play(client, number) for number in range(SESSIONS)))


if __name__ == "__main__":
    engine = NativeEngine(load_hf_config({"path": str(MODEL)}), SESSIONS, 2048)
    engine.load_weights(read_weights(MODEL), 0)
    speeds: list[list[float]] = [[], []]
    for _ in range(ROUNDS + 1):
        for side, play in enumerate((lambda: alone(engine), lambda: asyncio.run(through(sys.argv[1])))):
            start = time.perf_counter()
            play()
            speeds[side].append(2 * SESSIONS * TOKENS / (time.perf_counter() - start))
    own, served = (median(each[1:]) for each in speeds)
    print(f"engine alone {own:,.0f} tokens/s, through HTTP {served:,.0f}, ratio {served / own:.2f}")
