"""The memory plan beside what processes really take on CPU, phase by phase.

    python scripts/bench_memory.py [--models 100m 350m-bf16 ..] [--processes 1 2] [--settings "key=value .."]

A random model of each size is written to a folder (once). Worker processes load it, sample, compute log-probs
and values and update it, twice, as they do for the trainer. Every trajectory is about as long as it may be,
which is what the plan assumes.

A phase's figure is the most memory that was resident in it, by the kernel's own mark (VmHWM, reset for each
phase), of all processes together. The table is Markdown, in GiB. In brackets is the plan as a share of the
figure. Behind it is the most that belonged to no file (RssAnon + RssShmem, read each 5 ms).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import verl  # noqa: E402, F401  # isort: skip  (first: it says which Python has a missing package)
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen3Config

from verl.planning.hardware import GIB, Hardware
from verl.planning.memory_plan import PHASES, Plan
from verl.planning.passes import Passes
from verl.protocol import DataProto, object_array
from verl.sessions.engine_contract import RolloutEngine, SamplingParams
from verl.trainer.config import load_config
from verl.workers.engine.loading import DTYPES, load_hf_config

FIELDS = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads vocab_size"
MODELS = {  # class of the config, the fields above, and whether the output matrix is the embedding's
    "100m": (Qwen2Config, 512, 1792, 20, 8, 2, 65_536, True),
    "200m": (Qwen3Config, 768, 2304, 14, 12, 4, 151_936, True),
    "350m": (Qwen2Config, 1024, 3584, 21, 16, 4, 32_000, False),
}


@dataclass(frozen=True)
class Work:
    """The work of each process.

    Attributes:
        rows: trajectories of a step.
        prompt: tokens of a prompt.
        longest: tokens of the longest trajectory.
        in_a_pass: tokens of a pass.
    """

    rows: int = 4
    prompt: int = 32
    longest: int = 256
    in_a_pass: int = 512

    def settings(self, folder: Path, num_processes: int, more: Sequence[str] = ()) -> list[str]:
        """Return the settings of a step of one mini-batch, in several passes."""
        rows = self.rows * num_processes
        block_paths = ("rollout.log_prob", "ref.log_prob", "actor.ppo")
        blocks = [*(f"actor_rollout_ref.{block_path}" for block_path in block_paths), "critic.ppo"]
        dynamic = [
            block_path.replace(".log_prob", ".log_prob_").replace(".ppo", ".") for block_path in blocks
        ]
        return [
            *(f"{block}.model.path={folder}" for block in ("actor_rollout_ref", "critic")),
            *(f"{block_path}_max_token_len_per_gpu={self.in_a_pass}" for block_path in blocks),
            *(f"{block_path}use_dynamic_bsz=true" for block_path in dynamic),
            *(f"data.{name}_batch_size={rows}" for name in ("train", "val")),
            f"actor_rollout_ref.actor.ppo_mini_batch_size={rows}",
            f"critic.ppo_mini_batch_size={rows}",
            f"data.max_prompt_length={self.longest}",
            f"data.max_start_length={self.prompt}",
            f"trainer.n_gpus_per_node={num_processes}",
            "trainer.device=cpu",
            "trainer.async_checkpoint=false",
            *more,
        ]


def write_model(name: str, folder: Path) -> Path:
    """Write a random model of a size, with "-bf16" in 16 bits, and a tokenizer of a few words."""
    if not (folder / "tokenizer.json").is_file():
        size, _, dtype = name.partition("-")
        make, *sizes, tied = MODELS[size]
        shape = dict(zip(FIELDS.split(), sizes, strict=True), tie_word_embeddings=tied)
        config = make(**shape, head_dim=shape["hidden_size"] // shape["num_attention_heads"])
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype or "fp32"])
        model.save_pretrained(folder)
        words = Tokenizer(models.WordLevel({str(i): i for i in range(1000)}, unk_token="0"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        PreTrainedTokenizerFast(tokenizer_object=words, eos_token="1").save_pretrained(folder)
    return folder


# ------------------------------------------------------------------------------------------------ a worker


class LongestAgent:
    """An agent that samples the longest trajectories that are allowed.

    Some are one or two tokens shorter. Trajectories of equal lengths would be attended together, which is
    rare in practice.
    """

    def __init__(self, work: Work, tokenizer: Any, engine: RolloutEngine) -> None:
        self.work = work
        self.engine = engine

    def close(self) -> None:
        pass

    def run_llm_loop(self, prompts: DataProto) -> DataProto:
        work = self.work
        contexts = list(prompts.non_tensor_batch["raw_prompt_ids"])
        rows = {}
        for row, ids in enumerate(contexts):
            params = SamplingParams(work.longest - work.prompt - row % 3, seed=row, ignore_eos=True)
            rows[self.engine.open(ids, params)] = row
        while self.engine.has_runnable:
            for ended in self.engine.step():
                self.engine.close(ended.session_id)
                contexts[rows[ended.session_id]] = [*contexts[rows[ended.session_id]], *ended.token_ids]
        num_padding = [work.longest - len(ids) for ids in contexts]
        attention = torch.tensor([[1] * (work.longest - n) + [0] * n for n in num_padding])
        return DataProto.from_dict(
            {
                "input_ids": torch.tensor(
                    [ids + [0] * n for ids, n in zip(contexts, num_padding, strict=True)]
                ),
                "attention_mask": attention,
                "position_ids": attention.cumsum(1) - 1,
                "response_mask": attention[:, work.prompt :],
            }
        )


def passes_of(work: Work, settings: Sequence[str], rank: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield each phase and what happens in it: loading, and two steps of training."""
    from verl.trainer.main_ppo import worker_classes

    config = load_config(list(settings))
    passes = Passes(config)
    block = config.actor_rollout_ref
    actor_class, critic_class = worker_classes(config)
    role = "actor_rollout_ref" if passes.needs_reference else "actor_rollout"
    actor = actor_class(block, role, partial(LongestAgent, work), device="cpu")
    workers = [actor, *([critic_class(config.critic, device="cpu")] if passes.needs_values else [])]
    generator = torch.Generator().manual_seed(rank)
    batch = DataProto()
    vocabulary = load_hf_config(block.model).get_text_config().vocab_size

    def load() -> None:
        for worker in workers:
            worker.init_model()
        actor.start_rollout(work.rows)

    def generate() -> None:
        nonlocal batch
        prompts = torch.randint(5, vocabulary, (work.rows, work.prompt), generator=generator).tolist()
        requests = DataProto.from_dict({"sampling_seeds": torch.arange(work.rows)})
        requests.non_tensor_batch["raw_prompt_ids"] = object_array(prompts)
        actor.sync_weights()
        batch = actor.generate_sequences(requests)
        for name in ("advantages", "returns"):
            batch.batch[name] = torch.randn(batch.batch["response_mask"].shape, generator=generator)
        batch.meta_info = {"num_mini_batches": 1}

    yield "loading", load
    for _ in range(2):
        yield "rollout", generate
        yield "log_probs", lambda: batch.union(actor.compute_log_prob(batch))
        if passes.needs_reference:
            yield "reference", lambda: batch.union(actor.compute_ref_log_prob(batch))
        if passes.needs_values:
            yield "values", lambda: batch.union(workers[1].compute_values(batch))
            yield "update_critic", lambda: workers[1].update_critic(batch)
        yield "update_actor", lambda: actor.update_actor(batch)


def process(connection: Connection, work: Work, settings: Sequence[str], variables: dict[str, str]) -> None:
    """Send the name of the next pass, and do the pass when the connection says so."""
    os.environ.update(variables)
    torch.set_num_threads(1)
    for phase, run in passes_of(work, settings, int(variables["RANK"])):
        connection.send(phase)
        connection.recv()
        run()
    connection.send("")


# -------------------------------------------------------------------------------------------- the measurement


def memory_bytes(pids: Sequence[int], *fields: str) -> int:
    """Return the bytes in these fields of the kernel's status of the processes, added up."""
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
    return sum(int(line.split()[1]) * 1024 for line in lines if line.partition(":")[0] in fields)


def measure_phases(work: Work, settings: Sequence[str], num_processes: int) -> dict[str, tuple[int, int]]:
    """Measure the memory of each phase over all processes.

    Returns:
        phase -> most bytes that were resident in it, and most bytes that were anonymous or shared. "" has
        what the processes held before.

    Raises:
        EOFError: one of them has failed.
    """
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    connections = []
    pids = list[int]()
    for rank in range(num_processes):
        parent_end, child_end = context.Pipe()
        group_variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_processes}
        group_variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
        variables = {name: str(value) for name, value in group_variables.items()}
        worker = context.Process(target=process, args=(child_end, work, settings, variables), daemon=True)
        worker.start()
        child_end.close()
        connections.append(parent_end)
        pids.append(int(worker.pid or 0))
    phase = [connection.recv() for connection in connections][0]
    most_bytes = {"": (memory_bytes(pids, "VmRSS"), memory_bytes(pids, "RssAnon"))}
    while phase:
        for pid, connection in zip(pids, connections, strict=True):
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # resets the kernel's mark
            connection.send("")
        most_anonymous = 0
        while not all(connection.poll(0.005) for connection in connections):
            most_anonymous = max(most_anonymous, memory_bytes(pids, "RssAnon", "RssShmem"))
        before = most_bytes.get(phase, (0, 0))
        most_bytes[phase] = max(before[0], memory_bytes(pids, "VmHWM")), max(before[1], most_anonymous)
        phase = [connection.recv() for connection in connections][0]
    return most_bytes


def plan_phases(settings: Sequence[str]) -> dict[str, int]:
    """Return the bytes of each phase by the plan."""
    config = load_config(list(settings))
    plan = Plan(config, Hardware.of(config))
    return {phase: plan.loads[0].total(phase) for phase in plan.phases}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--processes", nargs="+", type=int, default=[1])
    parser.add_argument("--settings", nargs="+", default=["algorithm.adv_estimator=grpo"])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "bench_memory")
    options = parser.parse_args()
    work = Work()
    phases = [phase for phase in PHASES if phase != "teacher"]
    print(f"| run | {' | '.join(PHASES[phase] for phase in phases)} |\n|{'---|' * (len(phases) + 1)}")
    for name in options.models:
        folder = write_model(name, options.folder / name)
        for num_processes in options.processes:
            for more in options.settings:
                settings = work.settings(folder, num_processes, more.split())
                plan = plan_phases(settings)
                bytes_of = measure_phases(work, settings, num_processes)
                cells = [
                    f"{bytes_of[p][0] / GIB:.2f} ({plan[p] / bytes_of[p][0]:.3f}); {bytes_of[p][1] / GIB:.2f}"
                    if p in bytes_of and p in plan
                    else ""
                    for p in phases
                ]
                label = f"{name}, {num_processes} x {more}, {bytes_of[''][0] / GIB:.2f} before"
                print(f"| {label} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
