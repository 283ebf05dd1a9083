"""Which engine a configuration gets, and with what memory."""

import dataclasses
import importlib.util
import json
import math

import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen3Config

from verl.config import replace_values
from verl.trainer.config import load_config
from verl.workers.rollout.build import (
    MIN_SEQUENCES,
    EngineRequest,
    _kv_bytes,
    _vllm_arguments,
    build_rollout_engine,
    engine_name,
    model_parallel_size,
    weight_backend,
)
from verl.workers.rollout.native import NativeEngine
from verl.workers.rollout.native.architecture import ModelSpec

CPU = torch.device("cpu")
QWEN = {"model_type": "qwen3", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16}
QWEN |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
POSITION_BYTES = 2 * 2 * 1 * 8 * 4  # keys and values, layers, heads, width, float32


@pytest.fixture
def qwen(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    save_file({"another": torch.zeros(1)}, tmp_path / "model.safetensors")  # only its header is read
    return tmp_path


def build(model_path, *overrides, num_rows=4, max_model_len=64, dtype=torch.float32):
    block = load_config([f"actor_rollout_ref.model.path={model_path}", *overrides]).actor_rollout_ref
    return build_rollout_engine(
        block.rollout, block.model, EngineRequest(CPU, dtype, max_model_len, num_rows)
    )


def test_native_has_room_for_the_rows_within_max_num_seqs(qwen):
    for num_rows, max_num_seqs, expected in ((4, 1024, MIN_SEQUENCES), (300, 1024, 300), (300, 200, 200)):
        engine = build(qwen, f"actor_rollout_ref.rollout.max_num_seqs={max_num_seqs}", num_rows=num_rows)
        assert isinstance(engine, NativeEngine)
        assert (engine.max_num_seqs, engine.max_model_len, engine.version) == (expected, 64, -1)
        assert engine.num_blocks == expected * 2  # 64 positions in blocks of 32


def test_the_kv_cache_takes_what_the_rows_need_but_no_more_than_it_may(qwen):
    few = build(qwen, f"actor_rollout_ref.rollout.kv_cache_gb={100 * 16 * POSITION_BYTES / 2**30}")
    assert few.num_blocks == 50
    huge = build(qwen, num_rows=1000, max_model_len=1 << 20)  # 128 GiB at full length
    assert huge.num_blocks * 32 * POSITION_BYTES == 4 << 30
    with pytest.raises(ValueError, match="64 tokens needs .* raise rollout.kv_cache_gb"):
        build(qwen, "actor_rollout_ref.rollout.kv_cache_gb=1e-6")


@pytest.fixture
def gpu_of_80_gib(monkeypatch):
    """Sets how much of it is free, and how much this process holds unused, in GiB."""

    def free(left, unused=0):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (left << 30, 80 << 30))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: (unused + 5) << 30)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 5 << 30)

    return free


def test_the_kv_cache_on_cuda_takes_its_share_but_no_more_than_what_is_free(gpu_of_80_gib):
    share = "actor_rollout_ref.rollout.gpu_memory_utilization=0.5"
    rollout = load_config(["actor_rollout_ref.model.path=x", share]).actor_rollout_ref.rollout
    spec = ModelSpec.from_config(Qwen3Config(**QWEN | {"vocab_size": 1 << 26}))  # matrices of 2 GiB
    tied = ModelSpec.from_config(Qwen3Config(**QWEN | {"vocab_size": 1 << 26}, tie_word_embeddings=True))
    request = EngineRequest(torch.device("cuda:0"), torch.bfloat16, 1 << 20, 10**6)
    reads = dataclasses.replace(request, copies_weights=False)

    def gib(request, spec=spec, left=0, unused=0):
        gpu_of_80_gib(left, unused)
        return _kv_bytes(rollout, spec, request, 10**6) / (1 << 30)

    assert gib(request, left=79) == 40
    assert gib(reads, left=20) == 18
    assert gib(reads, left=20, unused=3) == 21
    assert gib(request, left=20) == pytest.approx(14, abs=1e-3)
    assert gib(request, tied, left=20) == pytest.approx(16, abs=1e-3)
    with pytest.raises(
        ValueError, match=r"0 GiB, but one trajectory of 1048576 tokens needs .* free GPU memory"
    ):
        gib(request, left=3)
    gpu_of_80_gib(20)
    few = dataclasses.replace(request, max_model_len=64)
    rollout = replace_values(rollout, {"gpu_memory_utilization": None})
    assert gib(dataclasses.replace(request, training_bytes=50 << 30), left=79) == pytest.approx(
        77.6 - 52 - 4, abs=1e-3
    )
    assert gib(dataclasses.replace(reads, training_bytes=50 << 30), left=79) == pytest.approx(77.6 - 52)
    with pytest.raises(ValueError, match="free GPU memory, for example by offloading"):
        gib(dataclasses.replace(request, training_bytes=78 << 30), left=79)
    gpu_of_80_gib(20)
    assert _kv_bytes(rollout, spec, few, 10) == 10 * 64 * POSITION_BYTES / 2  # bfloat16


def test_a_model_is_split_over_as_few_processes_as_hold_it_unless_a_number_is_set(qwen, monkeypatch):
    fields = QWEN | {"num_attention_heads": 4}
    (qwen / "config.json").write_text(json.dumps(fields))

    def found(most, *settings):
        block = load_config([f"actor_rollout_ref.model.path={qwen}", *settings]).actor_rollout_ref
        return model_parallel_size(block.rollout, block.model, most)

    assert found(8) == 1
    shapes = ModelSpec.from_config(Qwen3Config(**fields)).parameter_shapes()
    num_bytes = 2 * sum(math.prod(shape) for shape in shapes.values())
    for share, most, expected in ((0.5, 8, 2), (0.4, 8, 4), (0.4, 6, 2), (0.1, 2, 2)):
        monkeypatch.setattr("verl.workers.rollout.build.MAX_WEIGHT_BYTES", share * num_bytes)
        assert found(most) == expected
    assert found(8, "actor_rollout_ref.rollout.tensor_model_parallel_size=1") == 1


APART = ["actor_rollout_ref.rollout.placement=apart"]
CLIENT = ["actor_rollout_ref.rollout.name=remote", "actor_rollout_ref.rollout.remote.urls=http://a:1"]


@pytest.mark.parametrize(
    ("asked", "device", "settings", "expected"),
    [
        ("auto", "cuda:1", APART, "nccl"),
        ("auto", "cuda", CLIENT, "nccl"),
        ("auto", "cuda", [*CLIENT, *APART], "gloo"),  # a client of servers has no GPU
        ("auto", "cpu", APART, "gloo"),
        ("gloo", "cuda", APART, "gloo"),
        ("nccl", "cuda", CLIENT, "nccl"),
        ("nccl", "cpu", APART, None),
        ("nccl", "cuda", [*CLIENT, *APART], None),
    ],
)
def test_weights_go_by_nccl_from_gpu_to_gpu_or_as_is_said(asked, device, settings, expected):
    config = load_config([*settings, f"actor_rollout_ref.rollout.weight_backend={asked}"])
    rollout = config.actor_rollout_ref.rollout
    if expected is None:
        with pytest.raises(ValueError, match="weight_backend=nccl.*; expected GPUs on both sides"):
            weight_backend(rollout, device)
    else:
        assert weight_backend(rollout, device) == expected


def test_vllm_gets_what_training_leaves_of_a_gpu(gpu_of_80_gib, qwen):
    def share(training_bytes, *settings):
        block = load_config([f"actor_rollout_ref.model.path={qwen}", *settings]).actor_rollout_ref
        request = EngineRequest(
            torch.device("cuda:0"),
            torch.bfloat16,
            64,
            8,
            training_bytes=training_bytes and training_bytes << 30,
        )
        made = _vllm_arguments(block.rollout, block.model, Qwen3Config(**QWEN), request)
        return made["gpu_memory_utilization"]

    gpu_of_80_gib(79)
    assert share(50) == pytest.approx(0.97 - 52 / 80)
    assert share(None) == share(50, "actor_rollout_ref.rollout.placement=apart") == 0.9
    assert share(50, "actor_rollout_ref.rollout.gpu_memory_utilization=0.3") == 0.3
    with pytest.raises(ValueError, match=r"training holds 79.0 GiB of the GPU's 80.0, .*optimizer_offload"):
        share(79)


@pytest.mark.parametrize(
    "rope, text",
    [
        ({"rope_type": "proportional", "rope_theta": 10000.0}, "rope_type 'proportional'"),
        ({"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4, "partial_rotary_factor": 0.5}, "4 of 8"),
    ],
)
def test_positions_that_native_does_not_turn_are_refused_with_a_word_of_vllm(qwen, rope, text):
    (qwen / "config.json").write_text(json.dumps(QWEN | {"rope_parameters": rope}))
    with pytest.raises(ValueError, match=f"{text}.* needs vLLM"):
        build(qwen)


def test_auto_is_vllm_on_cuda_where_it_is_installed_else_native(monkeypatch):
    rollout = load_config(["actor_rollout_ref.model.path=x"]).actor_rollout_ref.rollout
    assert rollout.name == "auto"
    for installed, on_cuda in ((None, "native"), (object(), "vllm")):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, spec=installed: spec)
        assert engine_name(rollout, "cuda:0") == on_cuda and engine_name(rollout, "cpu") == "native"
    rollout = replace_values(rollout, {"name": "native"})
    assert engine_name(rollout, "cuda") == "native"
