"""Prove or refute what docs/gpu.md says, on this machine: one line a check, with a figure and a bar.

    bash scripts/gpu_acceptance.sh [--quick] [--only CHECK ...] [--shape 3b] [--out FOLDER]

Models are random, in the shapes of Qwen2.5, so nothing is downloaded. Each check runs in a process of its
own, and its result is written at once to FOLDER/gpu_acceptance.json and .md. The same command continues where
an earlier one stopped or failed (--again: measures anew). --quick: the smallest shape, fewer rounds. Without
a GPU the same code runs on CPU in tiny sizes, and only bars that hold on any machine are tested. The exit
status is 1 if a check failed.

    machine     bf16 products of this device
    step        rollout, log-probs, update: log-probs of both engines, speed, memory, sleeping, weights
    greedy      the rollout engine's greedy tokens in float32 are those of transformers' `generate`
    resume      updates from a checkpoint end bit for bit as those that went on (deterministic algorithms)
    offload     the same updates with weights and optimizer on the host between passes
    dense       exact search over 21 million vectors of 768 (--quick: 1 million)
    faiss       FAISS's copies of a Flat and an IVF index on all GPUs, beside what is counted for them
                (where FAISS is installed, on a GPU its build for GPUs)
    microworld  GRPO of the shipped tiny model on the microworld, in one process
    vllm        its decoding beside vLLM's own way; on a GPU also the microworld with vLLM beside the trainer
                (where vLLM is installed)
    layouts     the microworld over all GPUs, FSDP2, by Ray                       (two GPUs and more)
    megatron    the same on megatron-core, tensor 2                               (where it is installed)
    split       the same with vLLM, two processes to a model
    servers     one process trains, vLLM samples on another GPU
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import verl  # noqa: E402, F401  # isort: skip  (first: it says which Python has a missing package)
import numpy as np  # noqa: E402
import torch  # noqa: E402

from scripts.bench.acceptance import QWEN, Measurement, Setup, report  # noqa: E402
from scripts.bench.servers import ENVIRONMENT  # noqa: E402

LIMIT_S = 1800  # seconds of one check
TOKENS = 16384  # tokens of an update's pass


def contender(setup: Setup, name: str = "bf16", shape: str | None = None, *settings: str) -> Any:
    from scripts.bench_model_step import Contender

    block = "actor_rollout_ref.actor"
    common = ["actor_rollout_ref.model.enable_gradient_checkpointing=true", f"{block}.use_dynamic_bsz=true"]
    common += [f"{block}.ppo_max_token_len_per_gpu={TOKENS}", "algorithm.kl_ctrl.kl_coef=0", *settings]
    return Contender(
        str(setup.model(shape)), name, setup.device, 16 if setup.device == "cpu" else 256, common
    )


def machine(setup: Setup) -> Iterator[Measurement]:
    size = 256 if setup.device == "cpu" else 8192
    x = torch.randn(size, size, device=setup.device).bfloat16()
    seconds = []
    for _ in range(13):
        start = time.perf_counter()
        x @ x
        if setup.device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    yield Measurement(
        f"bf16 products of {size} x {size}", 2 * size**3 / median(seconds[3:]) / 1e12, "TFLOP/s"
    )


def step(setup: Setup) -> Iterator[Measurement]:
    from verl.config import load_config
    from verl.planning.hardware import Hardware
    from verl.planning.memory_plan import Plan

    on_cuda = setup.device == "cuda"
    rows = 256 if setup.device == "cuda" else 16

    def planned(*settings: str) -> float:  # GiB that the plan has for the actor's update
        config = load_config([*model.settings, *settings])
        load = Plan(config, Hardware("cuda", torch.cuda.mem_get_info()[1], "here")).loads[0]
        held = {name: parts.get("update_actor", 0) for name, parts in load.items.items()}
        return sum(size for name, size in held.items() if name.startswith("actor: ")) / 2**30

    def update(**limits: bool) -> tuple[float, float, float]:
        """Return (seconds, share of products, GiB at most) of an update beside a sleeping rollout engine."""
        model.actor.loop.limits = model.actor.limits = replace(model.limits, **limits)
        model.actor.update_policy(batch)
        torch.cuda.reset_peak_memory_stats()
        start = model.now()
        model.actor.update_policy(batch)
        seconds = model.now() - start
        share = 3 * model.needed_operations(batch) / seconds / model.products()
        return seconds, share, torch.cuda.max_memory_allocated() / 2**30

    model = contender(setup)
    model.round(0, rows)  # warms up, and compiles
    model.figures.clear()
    for number in range(1 if setup.quick else 3):
        model.round(1 + number, rows)
    figures = {name: median(values) for name, values in model.figures.items()}
    yield setup.measurement("log-probs apart, mean", figures["log-prob off, mean"])
    yield setup.measurement("log-probs apart, most", figures["log-prob off, most"])
    yield from _beside_transformers(setup, model)
    yield Measurement("products", figures["products, GFLOP/s"] / 1e3, "TFLOP/s, shapes of the model's layers")
    for part in ("log-probs", "rollout"):
        yield setup.measurement(
            f"{part}, share of products", figures[f"{part}: share"], f"{figures[part]:.2f} s"
        )
    yield Measurement("decode", rows * 60 / figures["rollout: decode"], f"tokens/s of {rows} sessions")
    sync = figures["weights to the rollout"]
    seconds = figures["rollout"] + figures["log-probs"] + figures["update"] + sync
    yield setup.measurement("weight sync, share of a step", sync / seconds, f"{sync:.4f} s of {seconds:.2f}")
    share = figures["update: share"]
    words = f"{figures['update']:.2f} s"
    if on_cuda:
        batch = model.trajectories(9, rows)
        yield Measurement("sleep gives back", model.rollout.sleep() / 2**30, "GiB of KV cache")
        yield Measurement("update, padded", rows / update(padded=True)[0], "trajectories/s")
        seconds, share, peak = update(padded=False)
        words = f"{seconds:.2f} s, checkpointing"
        yield Measurement("update, packed", rows / seconds, "trajectories/s")
        yield setup.measurement("update's memory, of the plan's", peak / planned(), f"{peak:.1f} GiB")
        without = "actor_rollout_ref.model.enable_gradient_checkpointing=false"
        if planned(without) < 0.9 * torch.cuda.mem_get_info()[1] / 2**30:
            yield Measurement("update with checkpointing, share", share, words)
            del model
            gc.collect()  # its layers refer to themselves
            torch.cuda.empty_cache()
            model = contender(setup, "bf16", None, without)
            model.rollout.sleep()
            seconds, share, peak = update(padded=False)
            words = f"{seconds:.2f} s, {peak:.1f} of {planned():.1f} GiB, no checkpointing"
    yield setup.measurement("update, share of products", share, words)


def _beside_transformers(setup: Setup, model: Any) -> Iterator[Measurement]:
    """Measure how far transformers' log-probs of some trajectories, in both types, are from the trainer's."""
    from transformers import AutoModelForCausalLM

    from verl.workers.actor.dp_actor import compute_log_prob

    batch = model.trajectories(8, 16)
    ids = batch.tensors["input_ids"]
    width = batch.tensors["response_mask"].shape[1]
    trained = compute_log_prob(model.trainer, batch, model.limits, 1.0)
    for name, dtype in (("transformers", model.dtype), ("transformers in float32", torch.float32)):
        plain = AutoModelForCausalLM.from_pretrained(setup.model(), dtype=dtype).to(model.device)
        differences = []
        with torch.inference_mode():
            for row, row_trained in zip(ids, trained, strict=True):
                logits = plain(row[None].to(model.device)).logits[0, -width - 1 : -1].float()
                log_probs = logits.log_softmax(-1).gather(1, row[-width:, None].to(model.device))[:, 0].cpu()
                differences.append((log_probs - row_trained)[row_trained != 0].abs())
        del plain
        most = f"mean; most {float(torch.cat(differences).max()):.3f}: beside the trainer"
        yield Measurement(f"log-probs apart, {name}", float(torch.cat(differences).mean()), most)


def greedy(setup: Setup) -> Iterator[Measurement]:
    """Check greedy tokens in float32 where the two best logits are not closer than rounding."""
    from transformers import AutoModelForCausalLM

    from verl.sessions.engine_contract import SamplingParams

    model = contender(setup, "fp32", "0.5b")
    model.rollout.load_weights(model.trainer.weights(), 1)
    plain = AutoModelForCausalLM.from_pretrained(setup.model("0.5b"), dtype=torch.float32).to(setup.device)
    generator = torch.Generator().manual_seed(0)
    count = 8
    length = 32
    prompts = [
        torch.randint(5, 1900, (20 + 9 * number,), generator=generator).tolist() for number in range(count)
    ]
    params = SamplingParams(length, 0.0, ignore_eos=True)
    sessions = {model.rollout.open(prompt, params): prompt for prompt in prompts}
    equal = total = 0
    while model.rollout.has_runnable:
        for completion in model.rollout.step():
            ids = torch.tensor(
                [[*sessions[completion.session_id], *completion.token_ids]], device=setup.device
            )
            with torch.inference_mode():
                logits = plain(ids).logits[0, -length - 1 : -1]
            chosen = logits.gather(1, ids[0, -length:, None])[:, 0]
            equal += int((logits.max(1).values - chosen <= 1e-4).sum())
            total += length
    yield setup.measurement("greedy tokens equal", equal / total, f"of {total}")


def _fixed_batches(model: Any) -> None:
    """Give the model `batch_of(seed)`: trajectories of its rollout, the same for each call."""
    model.rollout.load_weights(model.trainer.weights(), 1)
    batches = [model.trajectories(seed, 16) for seed in range(4)]
    model.batch_of = lambda seed: batches[seed]


def _update(model: Any, *seeds: int) -> None:
    for seed in seeds:
        model.actor.update_policy(model.batch_of(seed))


def _differing(a: Any, b: Any) -> float:
    return float(sum(int((x != y).sum()) for (_, x), (_, y) in zip(a, b, strict=True)))


def resume(setup: Setup) -> Iterator[Measurement]:
    torch.use_deterministic_algorithms(True)
    model = contender(setup, "bf16", "0.5b")
    _fixed_batches(model)
    _update(model, 0, 1)
    with tempfile.TemporaryDirectory(dir=setup.work) as folder:
        start = time.perf_counter()
        model.trainer.snapshot(folder).write()
        seconds = time.perf_counter() - start
        size = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
        yield Measurement("checkpoint", size / 2**30 / seconds, f"GiB/s, {size / 2**30:.2f} GiB")
        ended = []
        for _ in range(2):
            model.trainer.load(folder)
            _update(model, 2, 3)
            ended.append([(name, tensor.detach().clone()) for name, tensor in model.trainer.weights()])
        yield setup.measurement("values that differ after resuming", _differing(*ended))


def offload(setup: Setup) -> Iterator[Measurement]:
    torch.use_deterministic_algorithms(True)
    ended = list[Any]()
    batch_of = None
    for offloads in ("false", "true"):
        fsdp = "actor_rollout_ref.actor.fsdp_config"
        settings = [f"{fsdp}.param_offload={offloads}", f"{fsdp}.optimizer_offload={offloads}"]
        model = contender(setup, "bf16", "0.5b", *settings)
        if batch_of is None:
            _fixed_batches(model)
            batch_of = model.batch_of
        model.batch_of = batch_of
        with model.trainer.loaded(optimizer=True):
            _update(model, 0, 1)
        held = torch.cuda.memory_allocated() / 2**30 if setup.device == "cuda" else 0.0
        yield Measurement(f"held between updates, offload {offloads}", held, "GiB")
        with model.trainer.loaded():
            ended.append([(name, tensor.detach().cpu().clone()) for name, tensor in model.trainer.weights()])
        del model
    yield setup.measurement("values that differ with offloading", _differing(*ended))


def dense(setup: Setup) -> Iterator[Measurement]:
    from search_r1.search.dense.scan import VectorScan

    if setup.device == "cpu":
        count = 20_000
    else:
        count = 10**6 if setup.quick else 21 * 10**6
    width = 768
    if setup.device == "cuda":
        count = min(count, int(torch.cuda.mem_get_info()[0] * 0.8) // (2 * width))
    generator = torch.Generator(setup.device).manual_seed(0)
    vectors = torch.empty(count, width, dtype=torch.float16, device=setup.device)
    for block in vectors.split(2**20):
        block.normal_(generator=generator)
    planted = torch.randint(count, (512,), generator=torch.Generator().manual_seed(1))
    queries = vectors[planted.to(setup.device)].float().cpu().numpy()
    scan = VectorScan([vectors if setup.device == "cuda" else vectors.float()])
    scan.search(queries[:8], 3)
    for size in (1, 64, 512):
        start = time.perf_counter()
        _, rows = scan.search(queries[:size], 3)
        seconds = time.perf_counter() - start
        yield Measurement(
            f"exact search, {size} at once", size / seconds, f"queries/s over {count:,} x {width}"
        )
    yield setup.measurement("planted vectors found", float(np.mean(rows[:, 0] == planted.numpy())))


def faiss(setup: Setup) -> Iterator[Measurement]:
    on_gpus = setup.device == "cuda"
    if find_spec("faiss") is None:
        yield Measurement("faiss", math.nan, "FAISS is not installed", "not run")
        return
    from search_r1.search.dense.faiss_gpus import bytes_on_each, load_gpu_build, scratch_bytes
    from search_r1.search.dense.faiss_header import read_faiss_header
    from search_r1.search.dense.faiss_index import FaissIndex, build_index, read_mapped
    from search_r1.search.memory import visible_gpus

    if on_gpus:
        try:
            load_gpu_build()
        except ValueError as problem:
            yield Measurement("faiss", math.nan, str(problem), "not run")
            return
    count = 200_000 if setup.quick else 2_000_000
    if not on_gpus:
        count = 4_000
    vectors = np.random.default_rng(0).standard_normal((count, 768), np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    planted = np.random.default_rng(1).integers(count, size=512)
    for faiss_type in ("Flat", f"IVF{count // 400},SQ8"):
        path = setup.work / f"{faiss_type}.index"
        build_index(vectors, path, faiss_type, on_gpus, lambda *_: None)
        before = visible_gpus()
        index = FaissIndex(read_mapped(path), path, on_gpus, None, 1, lambda line: None)
        index.search(vectors[planted[:8]], 3)
        if on_gpus:
            after = visible_gpus()
            taken = max(old.free - new.free for old, new in zip(before, after, strict=True))
            counted = bytes_on_each(read_faiss_header(path), len(after)) + scratch_bytes(after[0].total)
            words = f"{faiss_type}: {taken / 2**30:.2f} GiB on each of {len(after)}"
            yield setup.measurement("FAISS's copy, of what is counted", taken / counted, words)
        start = time.perf_counter()
        _, rows = index.search(vectors[planted], 3)
        seconds = time.perf_counter() - start
        words = f"queries/s over {count:,} x 768"
        yield Measurement(f"FAISS {faiss_type}, 512 at once", 512 / seconds, words)
        is_first = [row[0] == number for row, number in zip(rows, planted, strict=True)]
        yield setup.measurement("planted vectors found", float(np.mean(is_first)), faiss_type)
        index.close()
        path.unlink()


def microworld(setup: Setup) -> Iterator[Measurement]:
    yield from _train(setup, "microworld", "trainer.backend=local", "trainer.n_gpus_per_node=1")


def vllm(setup: Setup) -> Iterator[Measurement]:
    if find_spec("vllm") is None:
        yield Measurement("vllm", math.nan, "vLLM is not installed", "not run")
        return
    from scripts.bench.vllm_checks import decode

    if setup.device == "cuda":  # it comes first, because this process keeps some GPU memory afterwards
        yield from _train(setup, "vllm", "trainer.n_gpus_per_node=1", "actor_rollout_ref.rollout.name=vllm")
    yield from decode(setup)


def layouts(setup: Setup) -> Iterator[Measurement]:
    yield from _on_several(setup, "FSDP2", "ray")


def megatron(setup: Setup) -> Iterator[Measurement]:
    block = "actor_rollout_ref.actor"
    cut = (f"{block}.strategy=megatron", f"{block}.megatron.tensor_model_parallel_size=2")
    yield from _on_several(setup, "Megatron, tensor 2", "megatron", *cut)


def split(setup: Setup) -> Iterator[Measurement]:
    rollout = "actor_rollout_ref.rollout"
    settings = (f"{rollout}.name=vllm", f"{rollout}.tensor_model_parallel_size=2")
    yield from _on_several(setup, "vLLM, split over 2", "vllm", *settings)


def servers(setup: Setup) -> Iterator[Measurement]:
    rollout = "actor_rollout_ref.rollout"
    settings = (f"{rollout}.name=vllm", f"{rollout}.placement=apart", "trainer.n_gpus_per_node=1")
    yield from _on_several(setup, "vLLM, apart", "vllm", *settings)


def _on_several(setup: Setup, name: str, package: str, *settings: str) -> Iterator[Measurement]:
    count = torch.cuda.device_count() // 2 * 2
    if count == 0 or find_spec(package) is None:
        reason = "one GPU, or none" if count == 0 else f"{package} is not installed"
        yield Measurement(name, math.nan, reason, "not run")
        return
    yield from _train(setup, name, "trainer.backend=ray", f"trainer.n_gpus_per_node={count}", *settings)


def _train(setup: Setup, name: str, *settings: str) -> Iterator[Measurement]:
    from scripts.bench.microworld_run import train_microworld

    em, step_seconds, seconds = train_microworld(setup.work, name, setup.device, settings)
    yield setup.measurement(f"{name}, EM", em, f"{len(step_seconds)} steps in {seconds:.0f} s")
    yield Measurement(f"{name}, a step", median(step_seconds), "s")


CHECKS: list[Callable[[Setup], Iterator[Measurement]]]
CHECKS = [machine, step, greedy, resume, offload, dense, faiss, microworld]
CHECKS += [vllm, layouts, megatron, split, servers]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    names = [check.__name__ for check in CHECKS]
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="CHECK")
    parser.add_argument("--shape", choices=[name for name in QWEN if name != "tiny"], default=None)
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "gpu_acceptance")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--in-process", metavar="CHECK", help=argparse.SUPPRESS)  # its lines go to stdout
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    setup = Setup(device, options.shape or ("0.5b" if options.quick else "3b"), options.quick, options.out)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.in_process:
        for line in CHECKS[names.index(options.in_process)](setup):
            print(json.dumps(asdict(line)), flush=True)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # exiting also stops the check under way
    file, page = (options.out / f"gpu_acceptance.{kind}" for kind in ("json", "md"))
    name, shape = (torch.cuda.get_device_name(), setup.shape) if device == "cuda" else ("CPU", "tiny")
    head = f"{name}, torch {torch.__version__}, {'quick, ' * options.quick}shape {shape}"
    earlier = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    # Figures that were measured on another machine, or with another shape, are dropped.
    results = earlier["checks"] if earlier.get("measured_on") == head else {}
    for name in options.only:
        if options.again or "fail" in [line["verdict"] for line in results.get(name, [{"verdict": "fail"}])]:
            results[name] = run_check(name, options)
            file.write_text(json.dumps({"measured_on": head, "checks": results}, indent=1), encoding="utf-8")
            page.write_text(report(results, head), encoding="utf-8")
        for check_line in results[name]:
            figure = f"{check_line['figure']:.4g} {check_line['unit']}"
            print(f"{check_line['verdict']:9} {name:10} {check_line['name']:40} {figure}", flush=True)
    failed = sum(line["verdict"] == "fail" for name in options.only for line in results[name])
    print(f"{page}: {failed} failed")
    return int(failed > 0)


def run_check(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run a check in a process of its own and return its lines.

    A check that broke has a failed line with its last words.
    """
    command = [sys.executable, __file__, "--in-process", name, "--out", str(options.out)]
    command += ["--quick"] * options.quick + (["--shape", options.shape] if options.shape else [])
    log = options.out / f"{name}.err"
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    environment["PYTHONPATH"] = ENVIRONMENT["PYTHONPATH"]
    out = options.out / f"{name}.out"
    with log.open("wb") as err, out.open("wb") as lines:
        check = subprocess.Popen(command, stdout=lines, stderr=err, env=environment, start_new_session=True)
        try:
            status: int | str = check.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            status = f"nothing after {LIMIT_S} s"
        finally:  # the check is killed with all processes that it has started
            with suppress(ProcessLookupError):
                os.killpg(check.pid, signal.SIGKILL)
            check.wait()
    check_lines = [json.loads(line) for line in out.read_text().splitlines() if line.startswith('{"name"')]
    if status:
        words = log.read_text(errors="replace").strip().splitlines()[-1:]
        reason = f"ended with {status}: {' '.join(words)[:200]} ({log})"
        check_lines.append(asdict(Measurement(name, math.nan, reason, "fail")))
    return check_lines


if __name__ == "__main__":
    raise SystemExit(main())
