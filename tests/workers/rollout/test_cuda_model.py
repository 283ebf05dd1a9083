"""Decoding on CUDA: kernels interpreted on a CPU and compiled without a GPU, and the real thing on one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout_models import generate, make_model, random_prompts

from verl.workers.rollout.engine import SamplingParams
from verl.workers.rollout.native import NativeEngine

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[2]


CHECKS = [
    "kernel_matches_reference",
    "cuda_model_gives_what_the_cpu_gives",
    "prefill_by_packed_keys_is_prefill_by_pages",
    "sampler_draws_what_the_cpu_draws",
    "sampler_follows_the_distribution",
    "nan_shows_in_the_log_probs",
]


def _run_check(check: str, interpret: str) -> None:
    paths = os.pathsep.join([str(_ROOT), str(_HERE), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "TRITON_INTERPRET": interpret, "PYTHONPATH": paths}
    subprocess.run([sys.executable, str(_HERE / "cuda_checks.py"), check], env=environment, check=True)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run for real")
@pytest.mark.parametrize("check", CHECKS)
def test_interpreted(check: str) -> None:
    pytest.importorskip("triton")
    _run_check(check, interpret="1")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("check", CHECKS)
def test_on_a_gpu(check: str) -> None:
    _run_check(check, interpret="0")


def _compiled(capability: int, kernel: Any, constants: dict[str, Any], pointers: dict[str, str]) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: "constexpr" if name in constants else "i32" for name in kernel.arg_names}
    signature |= {name: kind for name, kind in pointers.items() if signature.get(name) == "i32"}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    ("dtype", "head_dim", "group", "tokens", "splits"),
    [("bf16", 64, 7, 1, 4), ("bf16", 256, 2, 8, 1), ("fp32", 128, 4, 16, 1)],
)
def test_kernels_compile_for_a_gpu_that_is_not_there(
    capability: int, dtype: str, head_dim: int, group: int, tokens: int, splits: int
) -> None:
    pytest.importorskip("triton")
    from verl.workers.rollout.native.cuda.triton_attention import _attend, _combine, attend_constants

    names = ("tile_first", "tile_count", "tile_position", "tile_sequence", "tables")
    pointers = dict.fromkeys(names, "*i32") | dict.fromkeys(("query", "keys", "values"), f"*{dtype}")
    pointers |= dict.fromkeys(("parts", "lse", "out_lse"), "*fp32") | {"scale": "fp32", "softcap": "fp32"}
    torch_dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    constants = attend_constants(
        num_heads=2 * group,
        num_kv_heads=2,
        head_dim=head_dim,
        block_size=32,
        dtype=torch_dtype,
        max_count=tokens,
        num_splits=splits,
        window=100,
        softcap=50.0,
    )
    kernel = _compiled(
        capability, _attend, constants, pointers | {"out": "*fp32" if splits > 1 else f"*{dtype}"}
    )
    assert kernel.metadata.shared <= 101_376  # of a block, on a GPU for desktops
    if splits > 1:
        chosen = {name: constants[name] for name in ("NUM_HEADS", "HEAD_DIM", "BLOCK_DIM", "SPLITS")}
        _compiled(capability, _combine, chosen | {"BLOCK_SPLITS": 4}, pointers | {"out": f"*{dtype}"})


@pytest.mark.slow
@pytest.mark.parametrize("flag", [False, True])
def test_sampler_and_layers_compile_for_a_gpu_that_is_not_there(flag: bool) -> None:
    pytest.importorskip("triton")
    from verl.workers.rollout.native.cuda import triton_layers, triton_sampler

    kinds = dict.fromkeys(("best", "plain", "tempered", "temperature"), "*fp32")
    kinds |= {"logits": "*bf16", "uniform": "*fp64", "result": "*fp64", "where": "*i32", "softcap": "fp32"}
    sampler = {"HAS_SOFTCAP": flag, "CHUNK": 4096}
    _compiled(90, triton_sampler._sum_chunks, sampler, kinds)
    _compiled(90, triton_sampler._pick, sampler | {"BLOCK_CHUNKS": 64}, kinds)

    names = ("x_at", "out_at", "out_norm_at", "weight_at", "normed_at", "gate_at", "up_at", "result_at")
    names += ("query", "key", "value", "query_norm", "key_norm", "cos_at", "sin_at", "keys", "values")
    kinds = dict.fromkeys(names, "*bf16") | {"positions": "*i64", "places": "*i64", "eps": "fp32"}
    norm = {"HAS_OUT": True, "HAS_OUT_NORM": flag, "OFFSET": flag, "BLOCK": 1024}
    heads = {"HEADS": 14, "KV_HEADS": 2, "BLOCK_HEADS": 16, "BLOCK_KV_HEADS": 2}
    heads |= {"HALF": 32, "BLOCK_HALF": 32, "HAS_NORM": flag, "OFFSET": flag}
    _compiled(90, triton_layers._add_norm, norm, kinds)
    _compiled(90, triton_layers._rotate, heads, kinds)
    _compiled(90, triton_layers._gate_up, {"IS_SILU": flag, "BLOCK": 1024}, kinds)


def _cuda_engine(model: Any, **kwargs: Any) -> NativeEngine:
    engine = NativeEngine(model.config, 16, 128, dtype=torch.float32, device="cuda", **kwargs)
    engine.update_weights(model.named_parameters(), 1)
    return engine


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", ["qwen3", "gemma2", "mistral-sliding"])
def test_graphs_draw_what_eager_steps_draw(name: str) -> None:
    model = make_model(name)
    params = [SamplingParams(20, seed=seed) for seed in range(13)]
    prompts = random_prompts(13)
    eager = generate(_cuda_engine(model, enforce_eager=True), prompts, params)
    graphs = generate(_cuda_engine(model), prompts, params)
    assert [c.token_ids for c in graphs] == [c.token_ids for c in eager]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_a_decode_step_waits_for_the_device_once(enforce_eager: bool) -> None:
    engine = _cuda_engine(make_model(), enforce_eager=enforce_eager)
    for prompt in random_prompts(5):
        engine.open(prompt, SamplingParams(30))
    for _ in range(3):
        engine.step()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning, match="synchroniz") as warnings:
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(warnings) == 1
