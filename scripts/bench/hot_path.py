"""One hot path of this project, measured for scripts/bench_hot_paths.py in the checkout that it runs in.

    python scripts/bench/hot_path.py PATH '{"setting": value, ...}'

Each line of standard input asks for one round. The answer is a line of JSON with the figures of the round:
`seconds` (CPU time of the process, one thread), and figures that must agree between two versions.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path.cwd()), str(ROOT)]  # the modules of `verl` are those of the checkout

import verl  # noqa: E402, F401  # isort: skip  (first: it says which Python has a missing package)
import numpy as np  # noqa: E402
import torch  # noqa: E402

from scripts.bench.random_models import NUM_WORDS, write_random_qwen2  # noqa: E402
from verl.config import load_config  # noqa: E402
from verl.protocol import DataProto, object_array  # noqa: E402

Figures = dict[str, float]


def scoring(settings: dict[str, Any]) -> Callable[[], Figures]:
    """Score trajectories by exact match, as the driver does in each step.

    Settings: `trajectories`, of a searching policy in groups of 8 (2 searches and an answer of 20 tokens
    each), `observed` (tokens of documents after each search; a group sees 4 different texts), and `reader`:
    "default" for exact match, "user" for a function of a user, which gets the observed text too.
    """
    from transformers import AutoTokenizer

    from verl.trainer.ppo.scoring import RewardManager

    tokenizer = AutoTokenizer.from_pretrained("data_prep/base_model")
    generator = np.random.default_rng(0)
    num_rows = settings["trajectories"]
    observed = settings["observed"]
    answer = tokenizer.encode("<answer> Paris</answer>", add_special_tokens=False)

    def words(*shape: int) -> np.ndarray:
        return generator.integers(300, len(tokenizer), size=shape)

    prompts = np.repeat(words(-(-num_rows // 8), 64), 8, axis=0)[:num_rows]
    documents = words(-(-num_rows // 8), 4, observed)
    rows = []
    for row in range(num_rows):
        seen = documents[row // 8, generator.integers(0, 4, size=2)]
        rows.append(np.concatenate([words(20), seen[0], words(20), seen[1], words(20), answer]))
    responses = torch.from_numpy(np.stack(rows))
    response_mask = torch.ones_like(responses)
    response_mask[:, 20 : 20 + observed] = 0
    response_mask[:, 40 + observed : 40 + 2 * observed] = 0
    truth = {"style": "rule", "ground_truth": {"target": ["Paris"]}}
    data = DataProto.from_dict(
        {
            "prompts": torch.from_numpy(prompts),
            "responses": responses,
            "response_mask": response_mask,
            "attention_mask": torch.ones(num_rows, 64 + responses.shape[1], dtype=torch.int64),
        },
        {
            "data_source": object_array(["nq"] * num_rows),
            "reward_model": object_array([truth] * num_rows),
            "extra_info": object_array([{"index": row} for row in range(num_rows)]),
        },
    )
    functions = {"default": None, "user": _users_exact_match}
    manager = RewardManager(tokenizer, compute_score=functions[settings["reader"]])

    def score() -> Figures:
        start = time.process_time()
        scores = manager(data, return_dict=True)
        seconds = time.process_time() - start
        return {
            "seconds": seconds,
            "score": float(scores["reward_tensor"].sum()),
            "letters of answers": float(sum(len(text or "") for text in scores["answer"])),
        }

    return score


def _users_exact_match(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    from verl.utils.reward_score import default_compute_score

    return default_compute_score(data_source, solution_str, ground_truth) * bool(
        extra_info["segments"][1].text
    )


def update(settings: dict[str, Any]) -> Callable[[], Figures]:
    """Update the actor by one group of trajectories that have a long prompt in common.

    Settings: `size` (of scripts/bench/random_models.py), `prompt` and `completion` (tokens), `group`, and
    `dtype` (bf16 or fp32).
    """
    from verl.workers.actor.dp_actor import DataParallelPPOActor
    from verl.workers.engine.fsdp_engine import TrainEngine
    from verl.workers.engine.loading import Precision, load_policy
    from verl.workers.engine.update_loop import MicroBatchLimits

    device = torch.device("cpu")
    with tempfile.TemporaryDirectory() as folder:
        write_random_qwen2(settings["size"], Path(folder))
        keys = [
            f"actor_rollout_ref.model.path={folder}",
            f"actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype={settings['dtype']}",
            "actor_rollout_ref.actor.optim.lr=1e-9",
        ]
        block = load_config(keys).actor_rollout_ref
        precision = Precision.from_config(block.actor.fsdp_config, device)
        module = load_policy(block.model, precision.model)
    engine = TrainEngine(module, precision, block.actor.fsdp_config, device, 1, block.actor.optim)
    limits = MicroBatchLimits.from_config(block.actor, "ppo", device, not block.model.use_remove_padding)
    actor = DataParallelPPOActor(block.actor, engine, limits, temperature=1.0)
    group = settings["group"]
    completion = settings["completion"]
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(5, NUM_WORDS, (1, settings["prompt"]), generator=generator)
    responses = torch.randint(5, NUM_WORDS, (group, completion), generator=generator)
    rows = torch.cat([prompt.expand(group, -1), responses], 1)
    advantages = torch.randn(group, 1, generator=generator).expand(-1, completion)
    batch = DataProto.from_dict(
        {
            "input_ids": rows,
            "attention_mask": torch.ones_like(rows),
            "position_ids": torch.arange(rows.shape[1]).expand(rows.shape),
            "response_mask": torch.ones_like(responses),
            "rollout_log_probs": torch.full(responses.shape, -float(np.log(NUM_WORDS))),
            "old_log_probs": torch.full(responses.shape, -float(np.log(NUM_WORDS))),
            "advantages": advantages.contiguous(),
        },
        {},
        {"num_mini_batches": 1},
    )

    def step() -> Figures:
        start = time.process_time()
        metrics = actor.update_policy(batch)
        seconds = time.process_time() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        return {"seconds": seconds, "gradient": metrics["actor/grad_norm"], "most GiB": peak}

    return step


def attention(settings: dict[str, Any]) -> Callable[[], Figures]:
    """Attend over one row, forward and backward.

    Settings: `tokens`, `heads`, `width` (of a head), `dtype`. The share compares the operations that are
    needed (those of the causal triangle, 4 T T D / 2 for each head, and 2.5 times as many in the backward
    pass) with those of products [T, heads * width] by [heads * width, heads * width] in the same time and
    type.
    """
    from verl.packing.attention import Packing, packed_attention_forward

    tokens = settings["tokens"]
    heads = settings["heads"]
    width = settings["width"]
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[settings["dtype"]]
    generator = torch.Generator().manual_seed(0)
    q, k, v, pull = (torch.randn(1, heads, tokens, width, generator=generator).to(dtype) for _ in range(4))
    packing = Packing.of((tokens,), "cpu")
    inputs = [x.requires_grad_() for x in (q, k, v)]
    row = torch.randn(min(tokens, 2048), heads * width, generator=generator).to(dtype)
    matrix = torch.randn(heads * width, heads * width, generator=generator).to(dtype)

    def attend() -> Figures:
        start = time.process_time()
        out, _ = packed_attention_forward(torch.nn.Identity(), *inputs, None, packing=packing)
        gradients = torch.autograd.grad(out, inputs, pull.transpose(1, 2))
        seconds = time.process_time() - start
        count = max(1, 2**36 // (2 * row.shape[0] * matrix.numel()))
        start = time.process_time()
        for _ in range(count):
            row @ matrix
        rate = count * 2 * row.shape[0] * matrix.numel() / (time.process_time() - start)
        needed = 3.5 * 4 * heads * width * tokens * tokens / 2
        figures = {"seconds": seconds, "GFLOP/s": needed / seconds / 1e9, "products, GFLOP/s": rate / 1e9}
        figures["share"] = needed / seconds / rate
        figures["gradient"] = float(torch.stack([x.float().norm() for x in gradients]).norm())
        return figures

    return attend


PATHS = {"scoring": scoring, "update": update, "attention": attention}


def main() -> None:
    torch.set_num_threads(1)
    measure = PATHS[sys.argv[1]](json.loads(sys.argv[2]))
    for _ in sys.stdin:
        print(json.dumps(measure()), flush=True)


if __name__ == "__main__":
    main()
