"""Rollout and update of a real model beside the matrix products that they need at least.

    python scripts/bench_model_step.py MODEL_FOLDER [--dtypes bf16 fp32] [--rounds 3]      Markdown

The script runs in one process: on CPU with one thread and CPU seconds, with --device cuda in wall seconds.
All parts are measured by turns in each round; the table has medians.

The trajectories are groups of 8 that begin with one prompt of 80 tokens, and have two turns of 30 sampled
tokens, with 350 tokens of observation between them. Half of a group says the same in the first turn and gets
the same observation. The others share only the prompt.

"share" compares the operations that are needed with those that products could do in the same time. The needed
ones have shared beginnings once, scores within windows, logits of sampled tokens; an update needs three times
as many. The rate is that of products of this model's shapes in the same type and round: the best of torch's
and the packed ones.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import verl  # noqa: E402, F401  # isort: skip  (first: it says which Python has a missing package)
import torch
import torch.nn.functional as F

from verl.config import load_config
from verl.packing.packs import prefix_order
from verl.protocol import DataProto
from verl.sessions.engine_contract import SamplingParams
from verl.workers.actor.dp_actor import DataParallelPPOActor, compute_log_prob
from verl.workers.engine.fsdp_engine import TrainEngine
from verl.workers.engine.loading import DTYPES, Precision, load_hf_config, load_policy
from verl.workers.engine.update_loop import MicroBatchLimits
from verl.workers.rollout.native import NativeEngine
from verl.workers.rollout.native.architecture import ModelSpec
from verl.workers.rollout.native.cpu_model import Product, can_pack

GROUP = 8
PROMPT = 80
SAMPLED = 30
OBSERVED = 350
ROWS = {"cpu": 2048, "cuda": 16384}  # rows of the products


class Contender:
    """The model in one type, with its trainer and its rollout engine.

    `figures` maps a part to its figure in each round. `settings` are further keys of the configuration.
    """

    def __init__(
        self, folder: str, name: str, device: str = "cpu", sessions: int = 64, settings: Sequence[str] = ()
    ) -> None:
        dtype = f"actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype={name}"
        self.settings = [f"actor_rollout_ref.model.path={folder}", dtype, *settings]
        self.config = load_config(self.settings)
        block = self.config.actor_rollout_ref
        self.device = torch.device(device)
        self.dtype = DTYPES[name]
        actor = block.actor
        precision = Precision.from_config(actor.fsdp_config, self.device)
        module = load_policy(block.model, precision.model)
        self.trainer = TrainEngine(module, precision, actor.fsdp_config, self.device, 1, actor.optim)
        padded = not block.model.use_remove_padding
        self.limits = MicroBatchLimits.from_config(actor, "ppo", self.device, padded)
        self.actor = DataParallelPPOActor(actor, self.trainer, self.limits, temperature=1.0)
        self.rollout = NativeEngine(load_hf_config(block.model), sessions, 1024, self.dtype, self.device)
        self.spec = ModelSpec.from_config(load_hf_config(block.model))
        self.figures: dict[str, list[float]] = defaultdict(list)

    def now(self) -> float:
        """Return CPU seconds of the process, or on CUDA wall seconds when the GPU has done all its work."""
        if self.device.type == "cpu":
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    def products(self) -> float:
        """Return the operations per second of products with the layers' matrices and ROWS rows."""
        shapes = [s for name, s in self.spec.layer_shapes().items() if name.endswith("proj.weight")]
        options = {"dtype": self.dtype, "device": self.device}
        rows = ROWS[self.device.type]
        pairs = [(torch.randn(rows, s[1]).to(**options), torch.randn(s).to(**options)) for s in shapes]
        is_packable = self.device.type == "cpu" and can_pack(self.dtype)
        packed = [Product(weight, None) for _, weight in pairs] if is_packable else []
        rates = []
        with torch.inference_mode():
            for round_ in range(8):
                start = self.now()
                for number, (x, weight) in enumerate(pairs):
                    packed[number](x) if packed and round_ % 2 else F.linear(x, weight)
                rates.append(2 * rows * sum(w.numel() for _, w in pairs) / (self.now() - start))
        return max(rates)

    def needed_operations(self, batch: DataProto) -> float:
        """Return the operations of a forward pass over the distinct tokens.

        Of the last layer only the tokens that predict another one count.
        """
        spec = self.spec
        rows = batch.tensors["input_ids"]
        layer = 2 * sum(s[0] * s[1] for s in spec.layer_shapes().values() if len(s) == 2)
        keys = 4 * spec.hidden_size * spec.num_kv_heads * spec.head_dim
        total = 0.0
        for row, shared in prefix_order([ids.numpy() for ids in rows]):
            columns = torch.arange(shared, rows.shape[1])
            sampled = int(batch.tensors["response_mask"][row, max(0, shared - PROMPT) :].sum())
            seen = [float((columns + 1).clamp(max=window or 2**40).sum()) for window in spec.windows[:-1]]
            total += 4 * spec.num_heads * spec.head_dim * sum(seen)
            total += len(columns) * (layer * (spec.num_layers - 1) + keys)
            total += sampled * (layer - keys + 2 * spec.hidden_size * spec.vocab_size)
        return total

    def trajectories(self, seed: int, num_rows: int) -> DataProto:
        """Sample trajectories and time prefill and decode.

        A step that computes more new tokens than there are sessions is prefill, else decode.
        """
        generator = torch.Generator().manual_seed(seed)
        engine = self.rollout
        width = PROMPT + 2 * SAMPLED
        rows = torch.randint(5, self.spec.vocab_size, (num_rows, width + OBSERVED), generator=generator)
        groups = torch.arange(num_rows) // GROUP * GROUP
        alike = torch.arange(num_rows) % GROUP < GROUP // 2
        rows[:, :PROMPT] = rows[groups, :PROMPT]
        rows[alike] = rows[groups[alike]]
        log_probs = torch.zeros(rows.shape)
        mask = torch.zeros(rows.shape, dtype=torch.int64)
        sessions: dict[int, int] = {}  # session -> row
        seconds = {"rollout: prefill": 0.0, "rollout: decode": 0.0}
        for turn, (begin, end) in enumerate(((0, PROMPT), (PROMPT + SAMPLED, width + OBSERVED - SAMPLED))):
            for row in range(num_rows):
                temperature = 0.0 if turn == 0 and alike[row] else 1.0
                params = SamplingParams(SAMPLED, temperature, seed=1000 * seed + row, ignore_eos=True)
                if turn == 0:
                    sessions[engine.open(rows[row, begin:end].tolist(), params)] = row
                else:
                    engine.resume(list(sessions)[row], rows[row, begin:end].tolist(), params)
            while engine.has_runnable:
                start = self.now()
                before = engine.stats()["prefilled_tokens"]
                completions = engine.step()
                is_prefill = engine.stats()["prefilled_tokens"] - before > num_rows
                seconds[f"rollout: {'prefill' if is_prefill else 'decode'}"] += self.now() - start
                for completion in completions:
                    cells = sessions[completion.session_id], slice(end, end + SAMPLED)
                    rows[cells] = torch.tensor(completion.token_ids)
                    log_probs[cells] = torch.tensor(completion.log_probs)
            mask[:, end : end + SAMPLED] = 1
        for session in sessions:
            engine.close(session)
        for phase, value in seconds.items():
            self.figures[phase].append(value)
        columns = {
            "input_ids": rows,
            "attention_mask": torch.ones_like(rows),
            "position_ids": torch.arange(rows.shape[1]).expand(rows.shape),
            "response_mask": mask[:, PROMPT:],
            "rollout_log_probs": log_probs[:, PROMPT:],
            "advantages": mask[:, PROMPT:] * torch.randn(num_rows, 1, generator=generator),
        }
        return DataProto.from_dict(columns, {}, {"num_mini_batches": 1})

    def round(self, seed: int, num_rows: int) -> None:
        times = [self.now()]
        self.rollout.load_weights(self.trainer.weights(), seed)
        times.append(self.now())
        batch = self.trajectories(seed, num_rows)
        times.append(self.now())
        log_probs = compute_log_prob(self.trainer, batch, self.limits, 1.0)
        times.append(self.now())
        self.actor.update_policy(batch)
        times.append(self.now())
        sync, rollout, forward, update = (b - a for a, b in zip(times, times[1:], strict=False))
        rate = self.products()
        needed_operations = self.needed_operations(batch)
        sampled = batch.tensors["response_mask"].bool()
        off = (log_probs - batch.tensors["rollout_log_probs"])[sampled].abs()
        seconds = {"rollout": rollout, "log-probs": forward, "update": update, "weights to the rollout": sync}
        shares = {"rollout": 1, "log-probs": 1, "update": 3}
        self.figures["products, GFLOP/s"].append(rate / 1e9)
        self.figures["needed forward, TFLOP"].append(needed_operations / 1e12)
        self.figures["log-prob off, mean"].append(float(off.mean()))
        self.figures["log-prob off, most"].append(float(off.max()))
        for part, value in seconds.items():
            self.figures[part].append(value)
        for part, times_forward in shares.items():
            self.figures[f"{part}: share"].append(times_forward * needed_operations / seconds[part] / rate)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dtypes", nargs="+", default=["bf16", "fp32"], choices=["bf16", "fp32"])
    parser.add_argument("--device", choices=list(ROWS), default="cpu")
    parser.add_argument("--trajectories", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    contenders = {name: Contender(options.model, name, options.device) for name in options.dtypes}
    for round_ in range(options.rounds + 1):
        for contender in contenders.values():
            if round_ == 1:  # round 0 was the warm-up
                contender.figures.clear()
            contender.round(round_, options.trajectories if round_ else GROUP)
    print(f"| {' | '.join(['', *contenders])} |\n|{'---|' * (len(contenders) + 1)}")
    for part in next(iter(contenders.values())).figures:
        values = [f"{median(contender.figures[part]):.3g}" for contender in contenders.values()]
        print(f"| {' | '.join([part, *values])} |")


if __name__ == "__main__":
    main()
