"""Tokens per second through `python -m verl.inference`, over those of the engine alone.

    python scripts/bench_inference.py URL [--sessions 64] [--tokens 256] [--rounds 5]

URL: of a server of data_prep/base_model on this machine, started with --max_num_seqs 64. Both sides play
sessions of two turns, the second on what the first has left; they go by turns; the ratio is that of medians.
"""

from __future__ import annotations

import argparse
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

MODEL = ROOT / "data_prep" / "base_model"


def alone(engine: NativeEngine, sessions: int, tokens: int) -> None:
    def params(seed: int = 0) -> SamplingParams:
        return SamplingParams(tokens, seed=seed, ignore_eos=True)

    turns = {engine.open([359, 25, 546, 2199, number], params(number)): 1 for number in range(sessions)}
    while turns:
        for ended in engine.step():
            if turns[ended.session_id] == 1:
                turns[ended.session_id] = 2
                engine.resume(ended.session_id, [25] * 20, params())
            else:
                del turns[ended.session_id]
                engine.close(ended.session_id)


async def through(url: str, sessions: int, tokens: int, stream: bool) -> None:
    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=None)) as client:

        async def play(number: int) -> None:
            base = (await client.post(f"{url}/sessions")).json()["base_url"]
            messages = [{"role": "user", "content": f"Question: {number}"}]
            for _ in range(2):
                body = {"messages": messages, "max_tokens": tokens, "ignore_eos": True, "stream": stream}
                reply = await client.post(f"{base}/chat/completions", json=body)
                if not stream:
                    messages.append(reply.json()["choices"][0]["message"])
                    messages.append({"role": "user", "content": "\nand so on" * 5})
            await client.delete(base.removesuffix("/v1"))

        await asyncio.gather(*map(play, range(sessions)))


def main() -> None:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("url")
    for name, default in (("sessions", 64), ("tokens", 256), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    engine = NativeEngine(load_hf_config({"path": str(MODEL)}), args.sessions, 2048)
    engine.load_weights(read_weights(MODEL), 0)
    work = args.sessions, args.tokens
    sides = {
        "the engine alone": lambda: alone(engine, *work),
        "through HTTP": lambda: asyncio.run(through(args.url, *work, False)),
        "through HTTP, streamed": lambda: asyncio.run(through(args.url, *work, True)),
    }
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(args.rounds + 1):  # the first warms up
        for name, play in sides.items():
            start = time.perf_counter()
            play()
            speeds[name] += [2 * args.sessions * args.tokens / (time.perf_counter() - start)] * (number > 0)
    medians = {name: median(each) for name, each in speeds.items()}
    for name, speed in medians.items():
        print(f"{name}: {speed:,.0f} tokens/s, {speed / medians['the engine alone']:.2f}")


if __name__ == "__main__":
    main()
