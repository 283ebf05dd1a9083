"""Copies of a model behind servers of their own, and the flags that are vLLM's."""

from __future__ import annotations

import signal

import pytest
import torch

from verl.inference.replicas import Replica, replicas_of, run_replicas, visible_gpu_names
from verl.inference.server import main as serve
from verl.inference.server import rollout_block


def test_each_copy_has_a_port_and_gpus_of_its_own(monkeypatch):
    arguments = ["--model", "m", "--data_parallel_size", "2", "--tensor_parallel_size", "2"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    first, second = replicas_of(arguments, 8001, 2, 2, visible_gpu_names())
    assert [replica.environment for replica in (first, second)] == [
        {"CUDA_VISIBLE_DEVICES": "4,5"},
        {"CUDA_VISIBLE_DEVICES": "6,7"},
    ]
    assert first.command[1:3] == ["-m", "verl.inference"] and first.command[3:9] == arguments
    assert second.command[-4:] == ["--data_parallel_size", "1", "--port", "8002"]
    assert replicas_of(arguments, 8001, 2, 1, [])[1].environment == {}  # without GPUs
    with pytest.raises(ValueError, match=r"found 4 GPUs \(CUDA_VISIBLE_DEVICES=4,5,6,7\); expected 6, 2 for"):
        replicas_of(arguments, 8001, 3, 2, visible_gpu_names())
    with pytest.raises(ValueError, match="found --port 0; expected a number from which 2 ports follow"):
        replicas_of(arguments, 0, 2, 1, [])


def test_a_server_that_ends_ends_the_others_with_its_status(capfd):
    assert (
        run_replicas([Replica(["sleep", "60"], {}), Replica(["sh", "-c", "exit $CODE"], {"CODE": "3"})]) == 3
    )
    assert "a server has ended with status 3" in capfd.readouterr().err


def test_a_signal_ends_all_servers_and_is_no_failure():
    before = signal.getsignal(signal.SIGTERM)
    assert (
        run_replicas([Replica(["sleep", "60"], {}), Replica(["sh", "-c", "kill -TERM $PPID; sleep 60"], {})])
        == 0
    )
    assert signal.getsignal(signal.SIGTERM) is before


def parsed(monkeypatch, *flags: str):
    """Return the arguments with which a server would be started."""
    seen = []
    monkeypatch.setattr("verl.inference.server.model_folder", lambda model: model)
    monkeypatch.setattr("verl.inference.server.run_settings", lambda folder: {})
    monkeypatch.setattr("verl.inference.server.serve", lambda args, *_: seen.append(args) or 0)
    serve(["--model", "m", "--port", "0", *flags])
    return seen[0]


def test_vllms_flags_reach_the_engine_and_other_engines_refuse_them(monkeypatch):
    flags = ["--tensor_parallel_size", "4", "--gpu_memory_utilization", "0.6", "--quantization", "fp8"]
    args = parsed(monkeypatch, "--engine", "vllm", *flags, "--engine_args", '{"kv_cache_dtype": "fp8"}')
    rollout = rollout_block(args, torch.device("cuda"))
    assert (rollout.tensor_model_parallel_size, rollout.gpu_memory_utilization) == (4, 0.6)
    assert rollout.vllm.engine_args == {"quantization": "fp8", "kv_cache_dtype": "fp8"}
    args = parsed(monkeypatch, "--engine", "native", "--quantization", "fp8")
    with pytest.raises(ValueError, match="--quantization is for vLLM: found the engine native"):
        rollout_block(args, torch.device("cuda"))
    assert rollout_block(parsed(monkeypatch), torch.device("cpu")).tensor_model_parallel_size == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--engine_args", "[1]"], "expected an object"),
        (["--engine_args", "{x}"], "expected JSON"),
        (["--gpu_memory_utilization", "1.5"], "expected more than 0 and at most 1"),
        (["--tensor_parallel_size", "0"], "expected 1 or more"),
    ],
)
def test_wrong_values_are_told_before_anything_loads(flags, message, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        parsed(monkeypatch, *flags)
    assert message in capsys.readouterr().err
