"""What a process does in the test of mirrored engines (gloo, CPU); run by `torch.multiprocessing.spawn`."""

import os

import torch
import torch.distributed as dist
from rollout_models import make_model

from verl.protocol import DataProto, object_array
from verl.workers.rollout.engine import SamplingParams
from verl.workers.rollout.native import NativeEngine
from verl.workers.rollout.tensor_parallel import MirroredEngine

OBSERVATION = [3, 4]
NEW_TOKENS = 6


def make_engine():
    model = make_model("qwen3")
    engine = NativeEngine(model.config, max_num_seqs=3, max_model_len=64)
    engine.update_weights(model.named_parameters(), 0)
    return engine


def prompts_of(rank):
    """Two prompts in the first process, three in the second."""
    ids = object_array([[5 + rank, 7, 9 + row] for row in range(2 + rank)])
    seeds = torch.arange(2 + rank) + 10 * rank
    return DataProto.from_dict({"seeds": seeds}, non_tensors={"raw_prompt_ids": ids})


def two_turns(engine, prompts):
    """Two turns for each prompt, one session given up on the way: responses [N, 2 * NEW_TOKENS]."""
    seeds = prompts.tensors["seeds"].tolist()
    params = [SamplingParams(NEW_TOKENS, seed=seed, ignore_eos=True) for seed in seeds]
    rows = {
        engine.open(ids, params[i]): i for i, ids in enumerate(prompts.non_tensor_batch["raw_prompt_ids"])
    }
    unwanted = engine.open([1, 2, 3], params[0])
    engine.step()
    engine.close(unwanted)
    tokens = [[] for _ in seeds]
    while engine.has_runnable:
        for done in engine.step():
            row = rows[done.session_id]
            tokens[row] += done.token_ids
            if len(tokens[row]) == NEW_TOKENS:
                engine.resume(done.session_id, OBSERVATION, params[row])
            else:
                engine.close(done.session_id)
    return DataProto.from_dict(
        {"responses": torch.tensor(tokens)}, meta_info={"metrics": {"rows": len(seeds)}}
    )


def fails(prompts):
    raise ValueError("no such thing")


def rank_main(rank, world_size, port, out):
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    try:
        own = make_engine()
        engine = MirroredEngine(own, world_size)
        result = engine.run(prompts_of(rank), lambda prompts: two_turns(engine, prompts))
        counts = {
            name: own.stats()[name] for name in ("steps", "generated_tokens", "prefilled_tokens", "parked")
        }
        try:
            engine.run(prompts_of(rank), fails)
            error = None
        except (ValueError, RuntimeError) as caught:
            error = repr(caught)
        saved = {"responses": result.tensors["responses"], "meta_info": result.meta_info}
        torch.save(saved | {"counts": counts, "error": error}, out / f"rank{rank}.pt")
    finally:
        dist.destroy_process_group()
