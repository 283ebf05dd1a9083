"""GPU findings, from recorded output: no GPU is needed, and none of this has been seen on one yet."""

import json
import subprocess
from dataclasses import replace

import pytest
import torch
from doctor_facts import facts_with, found, machine_with

from verl.doctor.facts import Gpu, Index, Software
from verl.doctor.facts_gpu import (
    driver_version,
    look_at_gpus,
    look_at_software,
    nccl_before_torch,
    parse_nvidia_smi,
    with_matmul,
)
from verl.doctor.gpu_probe import probe

NVIDIA_SMI = """\
0, GPU-aaaa, NVIDIA H100 80GB HBM3, 81559, 1, 0, [N/A], No
1, GPU-bbbb, NVIDIA H100 80GB HBM3, 81559, 1, 3, [N/A], Yes
2, GPU-cccc, NVIDIA A10G, 23028, 20000, [N/A], Yes, [N/A]
"""
DRIVER = """\
NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.161.08  Thu Mar  7 12:00:00 UTC 2024
GCC version:  gcc version 12.2.0
"""
OPEN_DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build  (dvs)\n"
GPU = Gpu(0, "GPU-aaaa", "H100", 80 * 10**9, 10**6, 0, matmul_s=0.0016, is_right=True)
GPUS = tuple(replace(GPU, index=i, uuid=f"GPU-{i}") for i in range(4))


def test_a_gpu_that_shares_the_machines_memory_has_no_size_of_its_own():
    (gpu,) = parse_nvidia_smi("0, GPU-dddd, NVIDIA GB10, [N/A], [N/A], [N/A], [N/A], [N/A]")
    assert (gpu.name, gpu.total_bytes, gpu.used_bytes) == ("NVIDIA GB10", 0, 0)


def with_gpus(*gpus: Gpu, **changes):
    return machine_with(**{"gpus": gpus, "num_gpus": len(gpus)} | changes)


def test_healthy_gpus_have_no_findings():
    software = replace(machine_with().software, cuda_driver="580.82.07")
    facts = facts_with(
        {"trainer.device": "cuda"}, with_gpus(*GPUS, software=software), index=Index("/i", 10**9, True)
    )
    assert found(facts) == []
    uneven = replace(GPUS[1], matmul_s=0.0018)  # two that differ a little
    assert found(facts_with({}, with_gpus(GPUS[0], uneven))) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"matmul_s": 0.0031}, "GPU 3 (H100) takes 3.1 ms for a product, the others 1.6"),
        ({"ecc_errors": 2}, "GPU 3 (H100) has had 2 uncorrected memory errors"),
        ({"needs_reset": True}, "nvidia-smi --gpu-reset -i 3"),
        ({"is_right": False}, "gave two results for one product"),
        ({"matmul_s": None, "problem": "CUDA error: uncorrectable ECC error"}, "can't multiply two matrices"),
        ({"used_bytes": 30 * 10**9}, "has 30.0 of 80.0 GB in use already"),
    ],
)
def test_one_ailing_gpu_is_named(change, said):
    (finding,) = found(facts_with({}, with_gpus(*GPUS[:3], replace(GPUS[3], **change))), "gpu-health")
    assert said in finding.line


def test_of_two_gpus_the_slow_one_is_named():
    (finding,) = found(facts_with({}, with_gpus(GPUS[0], replace(GPUS[1], matmul_s=0.01))), "gpu-health")
    assert "GPU 1" in finding.what


def test_two_ranks_on_one_gpu():
    twice = machine_with(environment={"CUDA_VISIBLE_DEVICES": "0,1,1"}, num_gpus=2)
    assert "export CUDA_VISIBLE_DEVICES=0,1" in found(facts_with({}, twice), "gpu-shared")[0].do
    no_own = with_gpus(GPU, environment={"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"})
    assert "all of them take the first" in found(facts_with({}, no_own), "gpu-shared")[0].line
    nodes = (with_gpus(GPU, name="a"), with_gpus(GPU, name="b"))
    assert "more than one node (a and b)" in found(facts_with({}, nodes=nodes), "gpu-twice")[0].line


def test_a_driver_too_old_for_the_wheel_and_a_wheel_without_cuda(tmp_path):
    (tmp_path / "version").write_text(DRIVER)
    assert driver_version(tmp_path / "version") == "535.161.08"
    (tmp_path / "version").write_text(OPEN_DRIVER)
    assert driver_version(tmp_path / "version") == "580.82.07"
    assert driver_version(tmp_path / "none") is None
    old = Software("3.11.7", "2.13.0", "13.0", cuda_driver="535.161.08")
    (finding,) = found(facts_with({}, machine_with(software=old)), "cuda")
    assert "needs 580.65 or newer" in finding.what and "CUDA 12.x" in finding.do
    assert found(facts_with({}, machine_with(software=replace(old, torch_cuda="12.8"))), "cuda") == []
    without = replace(old, torch="2.13.0+cpu", torch_cuda=None)
    assert "built without CUDA" in found(facts_with({}, machine_with(software=without)), "cuda")[0].what
    assert found(facts_with({"trainer.device": "cpu"}, machine_with(software=without)), "cuda") == []


def test_an_nccl_that_the_linker_takes_before_torchs_own(tmp_path):
    (tmp_path / "libnccl.so.2.14.3").touch()
    (tmp_path / "libnccl.so.2").symlink_to("libnccl.so.2.14.3")
    loaded = nccl_before_torch({"LD_LIBRARY_PATH": f"/no/where:{tmp_path}"})
    assert loaded == {f"{tmp_path}/libnccl.so.2": "2.14.3"}
    assert nccl_before_torch({"LD_PRELOAD": f"{tmp_path}/libnccl.so.2"}) == loaded
    software = replace(machine_with().software, nccl_loaded=loaded)
    (finding,) = found(facts_with({}, machine_with(software=software)), "nccl")
    assert "NCCL 2.14.3, torch was built with 2.28.3" in finding.what
    assert f"take {tmp_path} out of LD_LIBRARY_PATH" in finding.do
    same = replace(software, nccl_loaded={"/x/libnccl.so.2": "2.28.3"})
    assert found(facts_with({}, machine_with(software=same)), "nccl") == []


def test_nodes_with_another_nccl():
    other = machine_with(name="node2", software=replace(machine_with().software, nccl_built="2.21.5"))
    (finding,) = found(facts_with({}, nodes=(machine_with(), other)), "nccl")
    assert finding.machines == ("node2",)


def test_an_index_larger_than_the_memory_of_the_gpus():
    facts = facts_with({}, with_gpus(*GPUS[:1]), index=Index("/e5", 90 * 10**9, on_gpu=True))
    (finding,) = found(facts, "index")
    assert "has 90.0 GB, the 1 GPUs here have 80.0 GB free" in finding.what
    assert found(facts_with({}, with_gpus(*GPUS), index=Index("/e5", 90 * 10**9, on_gpu=True)), "index") == []


def test_what_nvidia_smi_prints_is_read():
    gpus = parse_nvidia_smi(NVIDIA_SMI)
    assert [gpu.ecc_errors for gpu in gpus] == [0, 3, None]
    assert [gpu.needs_reset for gpu in gpus] == [False, True, True]
    assert gpus[0].total_bytes == 81559 * 2**20 and gpus[2].name == "NVIDIA A10G"
    assert parse_nvidia_smi("") == ()


def test_what_the_probe_prints_is_joined_to_the_gpus():
    gpus = parse_nvidia_smi(NVIDIA_SMI)
    said = {
        "0": {"matmul_s": 0.0016, "is_right": True},
        "1": {"problem": "CUDA error: launch failure"},
    }
    done = subprocess.CompletedProcess([], 0, json.dumps(said), "")
    assert with_matmul(gpus, done)[0].matmul_s == 0.0016
    assert with_matmul(gpus, done)[1].problem == "CUDA error: launch failure"
    died = subprocess.CompletedProcess([], -11, "", "Traceback\nSegmentation fault\n")
    assert with_matmul(gpus, died)[2].problem == "the matmul's process ended: Segmentation fault"
    assert with_matmul(gpus, None)[0].problem == "no matmul within 60 s"


def test_the_probe_measures_and_compares():
    told = probe(torch.device("cpu"), size=64, repeats=3)
    assert told["is_right"] and 0 < told["matmul_s"] < 1


def test_the_probe_sees_a_device_that_computes_wrong(monkeypatch):
    results = iter([torch.zeros(2, 2), torch.zeros(2, 2), torch.ones(2, 2)])
    monkeypatch.setattr(torch, "randn", lambda *_, **__: Scripted(results))
    assert probe(torch.device("cpu"), size=2, repeats=2)["is_right"] is False


class Scripted:
    """A matrix whose products come from a list."""

    def __init__(self, results) -> None:
        self.results = results

    def __matmul__(self, other) -> torch.Tensor:
        return next(self.results)


def test_a_machine_without_gpus_is_no_trouble(monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert look_at_gpus() == () or torch.cuda.is_available()
    assert look_at_software({}).torch == torch.__version__
