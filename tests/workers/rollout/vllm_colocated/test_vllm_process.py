"""vLLM inside the trainer's process leaves that process as it was."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

# A process with a group of its own, as the trainer's: an engine starts, works and ends, twice.
SCRIPT = """
import json, random, sys, threading
import numpy as np, torch, torch.distributed as dist
from pathlib import Path
from vllm_models import KV_BYTES, generate, make_model, write_config
from verl.sessions.engine_contract import SamplingParams
from verl.workers.rollout.vllm.colocated_engine import VllmEngine

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
for generator in (random, np.random):
    generator.seed(1)
torch.manual_seed(1)
expected = [random.random(), np.random.rand(), torch.rand(1).item()]
for generator in (random, np.random):
    generator.seed(1)
torch.manual_seed(1)

torch.set_num_threads(2)
model = make_model("qwen3-tied")
torch.manual_seed(1)
folder = write_config("qwen3-tied", Path(sys.argv[1]).parent / "model")
sizes = {"max_num_seqs": 4, "max_model_len": 64, "kv_cache_memory_bytes": KV_BYTES}
engines = [VllmEngine(folder, **sizes) for _ in range(2)]
tokens = []
for engine in engines:
    engine.load_weights(model.named_parameters(), 1)
for engine in engines:
    tokens.append(generate(engine, [[1, 2, 3]], SamplingParams(8, seed=3))[0].token_ids)
    engine.shutdown()
    engine.shutdown()
torch.set_num_threads(1)
total = torch.ones(1)
dist.all_reduce(total)
print(json.dumps({
    "same_tokens": tokens[0] == tokens[1],
    "same_numbers": expected == [random.random(), np.random.rand(), torch.rand(1).item()],
    "num_threads": torch.get_num_threads(),
    "group_works": dist.get_world_size() * total.item(),
    "threads": [t.name for t in threading.enumerate() if t is not threading.main_thread() and not t.daemon],
}))
dist.destroy_process_group()
"""


def test_random_numbers_threads_and_process_group_survive_two_engines(tmp_path: Path) -> None:
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "store")],
        env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{here}:{here.parents[3]}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "same_tokens": True,
        "same_numbers": True,
        "num_threads": 1,
        "group_works": 1.0,
        "threads": [],
    }


def test_two_processes_that_share_a_model_sample_what_one_with_the_whole_model_does(tmp_path: Path) -> None:
    here = Path(__file__).parent
    paths = [here, here.parents[1], here.parents[3]]
    environment = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(map(str, paths))}
    processes = []
    for rank, size in ((0, 2), (1, 2), (0, 1)):  # each hashes strings in another way
        folder = tmp_path / f"of-{size}"
        folder.mkdir(exist_ok=True)
        command = [sys.executable, str(here / "sharing_process.py"), str(folder), str(rank), str(size)]
        out = subprocess.PIPE
        processes.append(subprocess.Popen(command, env=environment, stdout=out, stderr=out, text=True))
    try:
        outputs = [process.communicate(timeout=400) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    two, follower, one = (json.loads(out.splitlines()[-1]) for out, _ in outputs)
    for part in (0, 1):  # synchronous and asynchronous scheduling
        leads, found, preempted = two[part]
        other_leads, nothing, _ = follower[part]
        alone_leads, expected, _ = one[0]
        assert (leads, other_leads, alone_leads) == (True, False, True)
        assert nothing == [] and len(found) == 2 * (2 * 30 + 3 * 16) and preempted > 0
        for (tokens, log_probs), (expected_tokens, expected_log_probs) in zip(found, expected, strict=True):
            assert tokens == expected_tokens
            assert log_probs == pytest.approx(expected_log_probs, abs=1e-4)
    # of workers: the place in the mesh, whether the agent's error came out, rows, tokens
    assert follower[2] == [[0, False], False, [0, 0]]
    assert two[2] == one[2] and two[2][:3] == [[0, True], True, [5, 3]]


def test_processes_that_vllm_starts_sample_as_one_that_has_the_whole_model(tmp_path: Path) -> None:
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, str(here / "split_process.py"), str(tmp_path)],
        env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{here}:{here.parents[3]}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "the same"
