"""Tokens per second through `python -m verl.inference`, over those of the engine alone.

    python -m verl.inference --model data_prep/base_model --max_num_seqs 64
    python scripts/bench_inference.py http://127.0.0.1:8001 [--model FOLDER] [--tokens 448] [--turns 6]

There are 64 players, each with `turns` / 2 sessions of two turns of `tokens` / 7 to `tokens`. Both sides are
measured by turns, 3 times after a warm-up of an eighth; the ratio is that of medians. The model must be the
one that is served (by default the shipped one).
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import verl  # noqa: E402, F401  # isort: skip  (first: it says which Python has a missing package)
import httpx  # noqa: E402

from verl.sessions.engine_contract import SamplingParams  # noqa: E402
from verl.utils.safetensors_file import read_weights  # noqa: E402
from verl.workers.engine.loading import load_hf_config  # noqa: E402
from verl.workers.rollout.native import NativeEngine  # noqa: E402

PLAYERS = 64
ROUNDS = 3


def alone(engine: NativeEngine, lengths: list[list[int]]) -> None:
    def play(number: int, turn: int, session: int) -> None:
        params = SamplingParams(lengths[number][turn], seed=number, ignore_eos=True)
        if turn % 2 == 0:
            session = engine.open([359, 25, 546, 2199, number], params)
        else:
            engine.resume(session, [25] * 20, params)
        players[session] = number, turn + 1

    players: dict[int, tuple[int, int]] = {}
    for number in range(PLAYERS):
        play(number, 0, -1)
    while players:
        for ended in engine.step():
            number, turn = players.pop(ended.session_id)
            if turn % 2 == 0:
                engine.close(ended.session_id)
            if turn < len(lengths[number]):
                play(number, turn, ended.session_id)


async def through(url: str, lengths: list[list[int]]) -> None:
    async def play(client: httpx.AsyncClient, number: int) -> None:
        for turn, length in enumerate(lengths[number]):
            if turn % 2 == 0:
                base = (await client.post(f"{url}/sessions")).json()["base_url"]
                messages = [{"role": "user", "content": f"Question: {number}"}]
            body = {"messages": messages, "max_tokens": length, "ignore_eos": True}
            reply = (await client.post(f"{base}/chat/completions", json=body)).json()
            messages += [reply["choices"][0]["message"], {"role": "user", "content": ":" * 20}]
            if turn % 2 == 1:
                await client.delete(base.removesuffix("/v1"))

    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=None)) as client:
        await asyncio.gather(*(play(client, number) for number in range(PLAYERS)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--model", type=Path, default=ROOT / "data_prep" / "base_model")
    parser.add_argument("--tokens", type=int, default=448)
    parser.add_argument("--turns", type=int, default=6)
    options = parser.parse_args()
    engine = NativeEngine(load_hf_config({"path": str(options.model)}), PLAYERS, 2048)
    engine.load_weights(read_weights(options.model), 0)
    rng = random.Random(0)
    url = options.url
    lengths = [
        [rng.randrange(options.tokens // 7, options.tokens) for _ in range(options.turns)]
        for _ in range(PLAYERS)
    ]
    times = []
    for played in [[[n // 8 for n in row] for row in lengths], *[lengths] * ROUNDS]:
        start = time.perf_counter()
        alone(engine, played)
        middle = time.perf_counter()
        asyncio.run(through(url, played))
        times.append((middle - start, time.perf_counter() - middle))
        print("seconds alone {:.1f}, through HTTP {:.1f}".format(*times[-1]), file=sys.stderr)
    alone_rate, http_rate = (
        sum(map(sum, lengths)) / median(column) for column in zip(*times[1:], strict=True)
    )
    ratio = http_rate / alone_rate
    print(f"engine alone {alone_rate:,.0f} tokens/s, through HTTP {http_rate:,.0f}, ratio {ratio:.2f}")
