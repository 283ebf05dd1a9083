"""The dry run's memory estimate against what a real run takes, on CPU.

    .venv/bin/python scripts/check_memory_estimate.py                   tiny and 100 M, 1 process and 2
    .venv/bin/python scripts/check_memory_estimate.py --cases tiny-1    one of them

For each case the workers of training are made (actor, reference, critic, native rollout engine), one update
is made and a few tokens are sampled. "measured" is the sum of the storages of the tensors that are alive: a
model's weights, its gradients after the backward pass, the optimizer's state after the step, the rollout
engine's KV pools. (oneDNN's packed matrices have no storage that python can see: the engine's own count
stands for them.) Below each case the resident memory (RSS) of rank 0 stands beside the same sum. Exits with 1
if any estimate is off by more than 10 %.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from omegaconf import DictConfig
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Qwen2Config

from verl.single_controller.base.worker import get_free_port
from verl.trainer.config import load_config
from verl.trainer.dry_run.hardware import Hardware, machine_memory
from verl.trainer.dry_run.plan import Models, build_plan
from verl.trainer.main_ppo import worker_classes
from verl.utils.packing import pack_rows
from verl.workers.engine.base import Engine, Share
from verl.workers.rollout.engine import SamplingParams

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "data_prep" / "base_model"
TOLERANCE = 0.1
MIB = 1 << 20
# name -> (model, processes, more settings)
CASES: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "tiny-1": ("tiny", 1, ()),
    "tiny-2": ("tiny", 2, ()),
    "tiny-2-muon": ("tiny", 2, ("actor_rollout_ref.actor.optim.name=muon",)),
    "tiny-1-lora": ("tiny", 1, ("actor_rollout_ref.model.lora_rank=8",)),
    "100m-1": ("100m", 1, ("actor_rollout_ref.rollout.max_num_seqs=64",)),
    "100m-2": ("100m", 2, ("actor_rollout_ref.rollout.max_num_seqs=64",)),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    arguments = parser.parse_args()
    worst = 0.0
    with tempfile.TemporaryDirectory(prefix="memory-estimate-") as folder:
        for name in arguments.cases:
            model, processes, settings = CASES[name]
            worst = max(worst, check(name, model_folder(model, Path(folder)), processes, settings))
    print(f"the estimate farthest off: {100 * worst:.1f} % (allowed: {100 * TOLERANCE:.0f} %)")
    return int(worst > TOLERANCE)


def check(name: str, model: Path, processes: int, settings: tuple[str, ...]) -> float:
    """Prints one case; returns the greatest relative error of its estimates."""
    overrides = [
        f"actor_rollout_ref.model.path={model}",
        f"critic.model.path={model}",
        f"trainer.n_gpus_per_node={processes}",
        "trainer.device=cpu",
        "data.train_batch_size=8",
        "data.val_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "critic.ppo_mini_batch_size=8",
        "algorithm.adv_estimator=gae",
        *settings,
    ]
    estimated = estimate(overrides)
    with tempfile.TemporaryDirectory() as folder:
        if processes == 1:
            measure(0, overrides, 1, 0, folder)
        else:
            torch.multiprocessing.spawn(
                measure, args=(overrides, processes, get_free_port(), folder), nprocs=processes
            )
        found = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(processes)]
    worst = 0.0
    print(f"\n{name}: MiB of rank 0 of {processes}")
    for part, measured in found[0]["parts"].items():
        ratio = estimated[part] / measured
        worst = max(worst, *(abs(estimated[part] / one["parts"][part] - 1) for one in found))
        print(
            f"  {part:32} estimate {estimated[part] / MIB:9.2f}  measured {measured / MIB:9.2f}  {ratio:.3f}"
        )
    print(
        f"  {'RSS since the start':32}          {'':9}  measured {found[0]['rss'] / MIB:9.2f}  "
        f"(sum of the parts {sum(found[0]['parts'].values()) / MIB:.2f})"
    )
    return worst


def estimate(overrides: list[str]) -> dict[str, int]:
    """What the dry run says of rank 0, by part: the most in any phase."""
    config = load_config(overrides)
    hardware = Hardware("cpu", machine_memory(), 8, "this machine")
    plan = build_plan(config, hardware, Models.of(config))
    return {item.name: max(item.phases.values(), default=0) for item in plan.processes[0].items}


# ------------------------------------------------------------------------------------ one real process


def measure(rank: int, overrides: list[str], processes: int, port: int, folder: str) -> None:
    """Makes the workers, an update and a rollout on this rank; writes what they took as json."""
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(processes),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    before = rss()
    config = load_config(overrides)
    actor_class, critic_class = worker_classes(config)
    actor = actor_class(
        config.actor_rollout_ref, "actor_rollout_ref", agent_factory=lambda *_: NoAgent(), device="cpu"
    )
    critic = critic_class(config.critic, device="cpu")
    for worker in (actor, critic):
        worker.init_model()
    parts: dict[str, int] = {}
    parts |= engine_parts("actor", actor.engine, {"temperature": 1.0, "with_entropy": True})
    parts |= engine_parts("critic", critic.engine, {})
    if actor.reference.own is not None:
        parts["reference: weights"] = num_bytes(actor.reference.own.module.parameters())
    parts |= rollout_parts(actor, config)
    gc.collect()
    (Path(folder) / f"{rank}.json").write_text(json.dumps({"parts": parts, "rss": rss() - before}))
    critic.close()
    actor.close()


class NoAgent:
    """The engine is driven by this script."""

    def close(self) -> None:
        pass


def engine_parts(owner: str, engine: Any, asked: dict[str, Any]) -> dict[str, int]:
    """Weights, gradients after a backward pass, optimizer state after a step."""
    backward(engine, asked)
    parameters = list(engine.module.parameters())
    parts = {
        f"{owner}: weights": num_bytes(parameters),
        f"{owner}: gradients": num_bytes(p.grad for p in parameters if p.grad is not None),
    }
    norm, applied = engine.step()
    assert applied, norm
    return parts | {f"{owner}: optimizer state": num_bytes(_state(engine.optimizer))}


def backward(engine: Engine, asked: dict[str, Any]) -> None:
    rows, length = 2, 24
    batch = {
        "input_ids": torch.arange(rows * length).view(rows, length) % 997,
        "attention_mask": torch.ones(rows, length, dtype=torch.int64),
        "position_ids": torch.arange(length).expand(rows, length),
        "response_mask": torch.ones(rows, length // 2, dtype=torch.bool),
    }
    part = pack_rows(batch, list(range(rows)), engine.device)
    engine.forward_backward([part], 1, lambda _, outputs: Share(outputs[0].square().sum(), {}), **asked)


def _state(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def rollout_parts(actor: Any, config: DictConfig) -> dict[str, int]:
    """The native engine's packed weights and KV pools, after a few sampled tokens."""
    rollout = config.actor_rollout_ref.rollout
    actor.start_rollout(config.data.train_batch_size * rollout.n * rollout.n_agent // actor.world_size)
    engine = actor.rollout_engine
    with torch.no_grad():
        engine.update_weights(actor.engine.weights(), 0)
    session = engine.open([1, 2, 3, 4], SamplingParams(max_tokens=4, ignore_eos=True))
    while engine.has_runnable:
        engine.step()
    runner = engine._runner
    parts = {
        "rollout: weights of its own": runner._own_bytes,
        "rollout: KV cache": num_bytes([*runner._keys, *runner._values]),
    }
    engine.close(session)
    return parts


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors' storages on this process, each once."""
    storages = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def rss() -> int:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


# --------------------------------------------------------------------------------------------- models


def model_folder(name: str, folder: Path) -> Path:
    """The tiny model, or one of 100 M random parameters, made once, with the tiny one's tokenizer."""
    made = folder / name
    if name == "tiny" or made.is_dir():
        return TINY if name == "tiny" else made
    shape = Qwen2Config(
        hidden_size=640,
        intermediate_size=2560,
        num_hidden_layers=12,
        num_attention_heads=10,
        num_key_value_heads=2,
        vocab_size=24_000,
        tie_word_embeddings=False,
    )
    AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16).save_pretrained(made)
    for file in TINY.glob("tokenizer*"):
        shutil.copy(file, made)
    return made


if __name__ == "__main__":
    sys.exit(main())
