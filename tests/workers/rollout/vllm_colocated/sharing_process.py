"""One of the processes that share a model, or one that has it alone; prints what it has sampled.

python sharing_process.py FOLDER RANK SIZE: first an engine, then a worker that trains and generates.
"""

import json
import os
import sys
from pathlib import Path

import torch.distributed as dist
from one_turn_agent import OneTurnAgent, gen_batch
from test_vllm_sessions import byte_tokenizer
from tiny_training import make_config
from vllm_models import generate, make_model, random_prompts, run, scheduled_ahead

from verl.sessions.engine_contract import SamplingParams
from verl.sessions.stop import StopCondition
from verl.workers.fsdp_workers import ActorRolloutRefWorker
from verl.workers.rollout.vllm.colocated_engine import VllmEngine

FEW_BLOCKS = 20 * 32 * 2 * 2 * 2 * 32 * 4  # positions, keys and values, layers, heads, channels, bytes


class Failing(OneTurnAgent):
    """Fails when it is told to, amid a generation."""

    fails = False

    def run_llm_loop(self, gen_batch):
        if self.fails:
            session_id = self.engine.open([1, 2], SamplingParams(5))
            self.engine.step()
            self.engine.close(session_id)
            raise ValueError("the agent failed")
        return super().run_llm_loop(gen_batch)


def sessions_with_turns(engine):
    """Turns that stop at different steps, several at once, in a cache that is too small for all."""
    stop = StopCondition(byte_tokenizer(), list("abcdefghij"))
    params = [SamplingParams(14, seed=seed, stop=stop) for seed in range(16)]
    prompts = [[3, 4, *prompt] for prompt in random_prompts(16, 20)]
    ids = [engine.open(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    found = []
    for turn in range(3):
        ended = run(engine)
        found += [[ended[i].token_ids, ended[i].log_probs] for i in ids]
        for i, one in zip(ids, params, strict=True):
            if turn < 2:
                engine.resume(i, [7, 8, 9], one)
    for i in ids:
        engine.close(i)
    return found


def of_an_engine(folder, size, asynchronous=False):
    engine = VllmEngine(
        str(folder), tensor_parallel_size=size, max_num_seqs=16, max_model_len=96,
        kv_cache_memory_bytes=FEW_BLOCKS // size, async_scheduling=asynchronous,
    )  # fmt: skip
    assert (engine._llm.engine_core.engine_core.batch_queue is not None) == asynchronous
    prompts = random_prompts(30)
    found = []
    for version in range(2):
        engine.load_weights(make_model("two-heads", seed=version).named_parameters(), version)
        with engine.leading() as leads:
            if leads:
                sampled = [SamplingParams(12, seed=seed) for seed in range(30)]
                for params in (SamplingParams(12, temperature=0.0), sampled):
                    found += [[c.token_ids, c.log_probs] for c in generate(engine, prompts, params)]
                found += sessions_with_turns(engine)
        engine.sleep(2)
        engine.wake()
    preempted = engine.stats()["preemptions"]
    engine.shutdown()
    return leads, found, preempted


def of_a_worker(folder, size):
    rollout = "actor_rollout_ref.rollout"
    settings = [f"{rollout}.name=vllm", f"{rollout}.tensor_model_parallel_size={size}"]
    config = make_config(folder, *settings, "data.max_prompt_length=64")
    worker = ActorRolloutRefWorker(config.actor_rollout_ref, "actor_rollout", Failing, device="cpu")
    worker.init_model()
    found = [worker.generate_sequences(gen_batch(5))]
    worker.agent.fails = True
    try:
        failed = len(worker.generate_sequences(gen_batch(5))) < 0
    except ValueError as error:
        failed = "the agent failed" in str(error)
    worker.agent.fails = False
    found.append(worker.generate_sequences(gen_batch(3)))
    result = [list(worker.mesh_rank("rollout")), failed, [len(batch) for batch in found]]
    result += [batch.batch["responses"].tolist() for batch in found if len(batch)]
    worker.close()
    return result


def main():
    folder = Path(sys.argv[1])
    rank = int(sys.argv[2])
    size = int(sys.argv[3])
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    own = folder / str(rank)
    make_model("two-heads").save_pretrained(
        own
    )  # before there is a group, of which only the first would write
    byte_tokenizer().save_pretrained(own)
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=size)
    step_by_step = of_an_engine(own, size)
    with scheduled_ahead():
        ahead = of_an_engine(own, size, asynchronous=True)
    print(json.dumps([step_by_step, ahead, of_a_worker(own, size)]))


if __name__ == "__main__":
    main()
