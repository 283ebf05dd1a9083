"""How close decoding on a GPU comes to the speed of its memory: `native` against transformers' `generate`.

    python scripts/bench_decode_gpu.py                            # on a CUDA device, about 6 minutes
    python scripts/bench_decode_gpu.py --shapes 0.5B --sequences 64
    python scripts/bench_decode_gpu.py --device cpu --tiny        # tries out the script itself

Random weights in the shapes of Qwen2.5-0.5B, 1.5B and 3B in bfloat16. A decode step must read every weight
once and the KV state of every sequence; at the bandwidth that a large copy reaches in the same run that takes
so long, and the table gives each engine's share of it. Steps are timed with all sequences decoding, sampling
at temperature 1 and log-probs included; `generate` has no log-probs. Then: does `sleep` free what it says?
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from verl.workers.rollout.engine import SamplingParams  # noqa: E402
from verl.workers.rollout.native import NativeEngine  # noqa: E402

# hidden, intermediate, layers, heads, KV heads, vocabulary
SHAPES = {
    "0.5B": (896, 4864, 24, 14, 2, 151936),
    "1.5B": (1536, 8960, 28, 12, 2, 151936),
    "3B": (2048, 11008, 36, 16, 2, 151936),
}
TINY = {"tiny": (64, 96, 2, 4, 2, 500)}


@dataclass(frozen=True)
class Sizes:
    """Tokens of a prompt, decode steps that are timed, bytes of the copy that measures bandwidth."""

    prompt: int
    steps: int
    copy_bytes: int


@dataclass(frozen=True)
class Row:
    """One line of the table; bytes_per_step are weights and KV state, tokens_per_second are decoded ones."""

    shape: str
    sequences: int
    engine: str
    tokens_per_second: float
    bytes_per_step: int
    bound_tokens_per_second: float

    @property
    def share(self) -> float:
        return self.tokens_per_second / self.bound_tokens_per_second


def make_model(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Random weights; embeddings are tied, as in the models of these shapes."""
    hidden, intermediate, layers, heads, kv_heads, vocab = shape
    config = Qwen2Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    with torch.device(device):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def copy_bandwidth(device: torch.device, num_bytes: int) -> float:
    """Bytes per second of a large copy on the device, bytes read and bytes written both counted."""
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)
        synchronize(device)

    return 2 * num_bytes / _median_seconds(copy, 12)


def _median_seconds(run: Callable[[], Any], repeats: int) -> float:
    """Median of `repeats` calls, after two that are not counted."""
    seconds = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:])


def bytes_per_step(model: PreTrainedModel, sequences: int, mean_length: float) -> int:
    """What a decode step has to read: each matrix once (the embedding as the head), and the KV state."""
    config = model.config
    head_dim = config.hidden_size // config.num_attention_heads
    item = next(model.parameters()).element_size()
    position = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * item
    return sum(p.nbytes for p in model.parameters()) + int(sequences * mean_length * position)


def make_engine(model: PreTrainedModel, sequences: int, sizes: Sizes, **kwargs: Any) -> NativeEngine:
    parameter = next(model.parameters())
    max_model_len = sizes.prompt + sizes.steps + 64
    return NativeEngine(
        model.config, sequences, max_model_len, dtype=parameter.dtype, device=parameter.device, **kwargs
    )


def start_decoding(engine: NativeEngine, sequences: int, sizes: Sizes, vocab: int) -> None:
    """Open all sequences and step until every prompt is computed."""
    generator = torch.Generator().manual_seed(0)
    params = SamplingParams(sizes.steps + 32)
    for prompt in torch.randint(0, vocab, (sequences, sizes.prompt), generator=generator).tolist():
        engine.open(prompt, params)
    while engine.stats()["prefilled_tokens"] < sequences * sizes.prompt:
        engine.step()


def native_step_seconds(model: PreTrainedModel, sequences: int, sizes: Sizes, enforce_eager: bool) -> float:
    engine = make_engine(model, sequences, sizes, enforce_eager=enforce_eager)
    engine.update_weights(model.named_parameters(), 1)
    start_decoding(engine, sequences, sizes, model.config.vocab_size)
    seconds = _median_seconds(engine.step, sizes.steps)
    assert engine.stats()["running"] == sequences, "a sequence ended before the steps were timed"
    engine.shutdown()
    return seconds


@torch.inference_mode()
def generate_step_seconds(model: PreTrainedModel, sequences: int, sizes: Sizes) -> float:
    """Decoding alone: the difference between a long and a short run, over the difference in tokens."""
    device = next(model.parameters()).device
    ids = torch.randint(0, model.config.vocab_size, (sequences, sizes.prompt), device=device)
    short, long = 2, 2 + max(4, sizes.steps // 3)

    def run(num_tokens: int) -> float:
        synchronize(device)
        start = time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=True,
            top_k=0,
            pad_token_id=0,
        )
        synchronize(device)
        return time.perf_counter() - start

    run(short)
    return (run(long) - run(short)) / (long - short)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def check_sleep(shape: str, model: PreTrainedModel, sizes: Sizes) -> list[dict[str, Any]]:
    """What each level says that it gave back, and what the device says; weights are the engine's own here."""
    parameter = next(model.parameters())
    other = torch.float32 if parameter.dtype != torch.float32 else torch.float64
    engine = make_engine(model, 8, sizes)
    rows = []
    for level in (1, 2):
        engine.wake()
        engine.update_weights(((name, p.detach().to(other)) for name, p in model.named_parameters()), level)
        if level == 1:
            start_decoding(engine, 8, sizes, model.config.vocab_size)
        else:
            engine.step()  # its turns go on
        before = _memory(parameter.device)
        said = engine.sleep(level)
        after = _memory(parameter.device)
        freed = {name: before[name] - after[name] for name in before}
        rows.append({"shape": shape, "level": level, "said_bytes": said, **freed})
    engine.shutdown()
    return rows


def _memory(device: torch.device) -> dict[str, int]:
    """Bytes that tensors take, and that are missing on the device; nothing is known on CPU."""
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    return {"allocated_bytes": torch.cuda.memory_allocated(device), "device_bytes": total - free}


def measure(
    name: str,
    model: PreTrainedModel,
    sequences: list[int],
    sizes: Sizes,
    bandwidth: float,
    engines: list[str],
) -> list[Row]:
    rows = []
    length = sizes.prompt + sizes.steps / 2
    for count in sequences:
        for engine in engines:
            if engine == "generate":
                seconds = generate_step_seconds(model, count, sizes)
            else:
                seconds = native_step_seconds(model, count, sizes, engine == "native eager")
            num_bytes = bytes_per_step(model, count, length)
            bound = count * bandwidth / num_bytes
            rows.append(Row(name, count, engine, count / seconds, num_bytes, bound))
            print(_line(rows[-1]), flush=True)
    return rows


def _line(row: Row) -> str:
    return (
        f"{row.shape:>5} {row.sequences:>9} {row.engine:<13} {row.tokens_per_second:>12,.0f} "
        f"{row.bytes_per_step / 1e9:>9.2f} {row.bound_tokens_per_second:>12,.0f} {row.share:>7.0%}"
    )


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes and counts")
    parser.add_argument("--shapes", nargs="+", help="of " + ", ".join(SHAPES))
    parser.add_argument("--sequences", nargs="+", type=int)
    parser.add_argument("--engines", nargs="+", default=["native", "native eager", "generate"])
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    shapes = TINY if options.tiny else SHAPES
    sizes = Sizes(12, 6, 1 << 20) if options.tiny else Sizes(512, 64, 2 << 30)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    sequences = options.sequences or ([1, 3] if options.tiny else [1, 64, 256])

    bandwidth = copy_bandwidth(device, sizes.copy_bytes)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, copy {bandwidth / 1e9:,.0f} GB/s (read and written)")
    print("shape sequences engine           tokens/s   GB/step     bound      share")
    rows: list[Row] = []
    sleep: list[dict[str, Any]] = []
    for shape in options.shapes or list(shapes):
        model = make_model(shapes[shape], device, dtype)
        rows += measure(shape, model, sequences, sizes, bandwidth, options.engines)
        sleep += check_sleep(shape, model, sizes)
        del model
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print("sleep: what it says that it freed, tensors' memory freed, the device's memory freed, in MB")
    for entry in sleep:
        megabytes = [f"{value / 1e6:,.1f}" for key, value in entry.items() if key.endswith("_bytes")]
        print(f"{entry['shape']:>5} level {entry['level']}: " + ", ".join(megabytes))
    result = {
        "device": name,
        "torch": torch.__version__,
        "bandwidth": bandwidth,
        "rows": [asdict(row) | {"share": row.share} for row in rows],
        "sleep": sleep,
    }
    print(json.dumps(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))
    return result


if __name__ == "__main__":
    main()
