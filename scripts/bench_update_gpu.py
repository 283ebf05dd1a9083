"""How close a policy update on a GPU comes to its matrix rate: packed, against a padded Hugging Face step.

    python scripts/bench_update_gpu.py                            # on a CUDA device
    python scripts/bench_update_gpu.py --shapes 3B --checkpointing
    python scripts/bench_update_gpu.py --device cpu --tiny        # tries out the script itself

Random weights in the shapes of Qwen2.5-0.5B, 1.5B and 3B in bfloat16, trajectories of 500 to 4,000 tokens of
which 60 % are retrieved text. Timed are forward and backward passes of one mini-batch, in micro-batches of
`--tokens` tokens; no optimizer step. MFU counts the operations that the loss needs (layers for every real
token, head for sampled tokens, causal attention; backward twice forward; nothing for padding or recomputing),
against the rate of a large bfloat16 matrix product in the same run. The padded step halves its micro-batch
until it fits; both sides have the same loss, which is printed. No Ray.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.bench.update_task import draw_trajectories  # noqa: E402
from scripts.bench_decode_gpu import SHAPES, TINY, make_model  # noqa: E402
from verl.utils.attention import PACKED_ATTENTION  # noqa: E402
from verl.utils.packing import pack_rows, plan_padded  # noqa: E402
from verl.utils.shared_prefixes import plan_by_prefix  # noqa: E402
from verl.workers.engine.loading import PolicyModel  # noqa: E402


@dataclass(frozen=True)
class Row:
    """One line of the table. tokens_per_second: real tokens; memory: at most allocated in the step, above
    weights and gradients (CUDA).
    """

    shape: str
    step: str
    micro_batch_tokens: int
    loss: float
    tokens_per_second: float
    mfu: float
    memory_gib: float


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(run: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Median of `repeats` calls after one that is not counted."""
    seconds = []
    for _ in range(repeats + 1):
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return median(seconds[1:])


def matmul_rate(device: torch.device, width: int) -> float:
    """Operations per second of a square bfloat16 matrix product."""
    left, right = (torch.randn(width, width, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * width**3 / seconds_of(lambda: left @ right, device, 10)


def needed_operations(model: PreTrainedModel, batch: dict[str, Tensor]) -> float:
    """Of forward and backward passes: 6 per weight of a layer and token, 6 per weight of the head and sampled
    token, 6 per head dimension and pair of attention (half of all pairs, twice 2 operations, three passes).
    """
    config = model.config
    lengths = batch["attention_mask"].sum(1).double()
    in_layers = sum(p.numel() for name, p in model.named_parameters() if ".layers." in name)
    head = config.hidden_size * config.vocab_size * float(batch["response_mask"].sum())
    attention = config.num_hidden_layers * config.hidden_size * float(lengths.square().sum())
    return 6 * (in_layers * float(lengths.sum()) + head + attention)


def as_rows(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The trajectories as `pack_rows` takes them."""
    attention = batch["attention_mask"]
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    return batch | {"position_ids": positions, "response_mask": batch["response_mask"][:, 1:]}


def packed_step(model: PreTrainedModel, batch: dict[str, Tensor], max_tokens: int) -> float:
    """Gradient of the mean of advantage * log-prob over the sampled tokens; returns that mean."""
    module, rows = PolicyModel(model), as_rows(batch)
    sequences = [
        ids[mask].numpy()
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True)
    ]
    device, total = model.device, torch.zeros((), device=model.device)
    for part in plan_by_prefix(sequences, max_tokens=max_tokens):
        packed = pack_rows(rows, part, device)
        log_probs, *_ = module(packed, 1.0, False)
        advantages = batch["advantages"][part].to(device)[:, None]
        loss = (packed.unpack(log_probs) * advantages).sum() / batch["response_mask"].sum()
        loss.backward()
        total += loss.detach()
    return float(total)


def padded_step(model: PreTrainedModel, batch: dict[str, Tensor], max_tokens: int) -> float:
    """The same with rows of like length padded to the longest of their micro-batch, and full logits."""
    device, total = model.device, torch.zeros((), device=model.device)
    lengths = batch["attention_mask"].sum(1).tolist()
    for rows in plan_padded(lengths, max_tokens=max_tokens):
        width = max(lengths[row] for row in rows)
        ids, attention, mask = (
            batch[key][rows, :width].to(device) for key in ("input_ids", "attention_mask", "response_mask")
        )
        logits = model(input_ids=ids, attention_mask=attention, use_cache=False).logits
        log_probs = logits[:, :-1].float().log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
        weights = batch["advantages"][rows].to(device)[:, None] * mask[:, 1:]
        loss = (log_probs * weights).sum() / batch["response_mask"].sum()
        loss.backward()
        total += loss.detach()
    return float(total)


def run_that_fits(step: Callable[[int], float], max_tokens: int) -> tuple[int, float]:
    """(micro-batch in tokens, loss): `max_tokens`, or the first half, quarter, .. that fits in memory."""
    while True:
        try:
            return max_tokens, step(max_tokens)
        except torch.cuda.OutOfMemoryError:
            if max_tokens < 1024:
                raise
        torch.cuda.empty_cache()
        max_tokens //= 2


def measure(shape: str, sizes: tuple[int, ...], options: argparse.Namespace, rate: float) -> list[Row]:
    """The packed and the padded step of one shape."""
    device, rows = torch.device(options.device), []
    batch = draw_trajectories(options.groups, 8, *options.lengths, 0.6, sizes[-1], seed=0)
    for name, step in (("packed", packed_step), ("padded", padded_step)):
        model = make_model(sizes, device, torch.bfloat16).train()
        model.set_attn_implementation(PACKED_ATTENTION if name == "packed" else "sdpa")
        if options.checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)

        def run(max_tokens: int, step: Any = step, model: Any = model) -> float:
            return step(model, batch, max_tokens)

        max_tokens, loss = run_that_fits(run, options.tokens)
        memory = 0.0
        if device.type == "cuda":
            before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
        seconds = seconds_of(lambda run=run, m=max_tokens: run(m), device, options.repeats)
        if device.type == "cuda":
            memory = (torch.cuda.max_memory_allocated(device) - before) / 2**30
        tokens = int(batch["attention_mask"].sum())
        mfu = needed_operations(model, batch) / seconds / rate
        rows.append(Row(shape, name, max_tokens, loss, tokens / seconds, mfu, memory))
        print(rows[-1], file=sys.stderr, flush=True)
        del model
    return rows


def table(rows: list[Row]) -> str:
    """Markdown."""
    head = ["shape", "step", "micro-batch, tokens", "tokens/s", "MFU", "peak memory, GiB", "loss"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in rows:
        cells = [row.shape, row.step, f"{row.micro_batch_tokens:,}", f"{row.tokens_per_second:,.0f}"]
        cells += [f"{row.mfu:.1%}", f"{row.memory_gib:.1f}", f"{row.loss:.4f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--tiny", action="store_true", help="a tiny shape and short rows, for a CPU")
    parser.add_argument("--tokens", type=int, default=16384, help="most tokens of a micro-batch")
    parser.add_argument("--groups", type=int, default=4, help="of 8 trajectories")
    parser.add_argument("--lengths", type=int, nargs=2, default=[500, 4000])
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations in backward")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args(arguments)
    if options.tiny:
        options.tokens, options.groups, options.lengths, options.repeats = 256, 1, [20, 60], 1
    rate = matmul_rate(torch.device(options.device), 256 if options.tiny else 8192)
    rows: list[Row] = []
    for shape, sizes in TINY.items() if options.tiny else [(name, SHAPES[name]) for name in options.shapes]:
        rows += measure(shape, sizes, options, rate)
    result = {
        "device": torch.cuda.get_device_name() if options.device == "cuda" else options.device,
        "torch": torch.__version__,
        "matmul_tflops": rate / 1e12,
        "rows": [asdict(row) for row in rows],
    }
    print(table(rows) + f"\n\nMatrix products: {rate / 1e12:.1f} TFLOP/s.")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1), encoding="utf-8")
    return result


if __name__ == "__main__":
    main()
