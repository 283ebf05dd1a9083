"""GPUs, their driver, CUDA and NCCL: cheap looks at once, nvidia-smi and a matmul when there is time.

Not yet measured on a machine with GPUs; what nvidia-smi prints is parsed from recorded output in the tests.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from verl.doctor.facts import Gpu, Software

DRIVER = Path("/proc/driver/nvidia/version")
QUERY = (
    "index,uuid,name,memory.total,memory.used,ecc.errors.uncorrected.volatile.total,"
    "retired_pages.pending,remapped_rows.pending"
)
SECONDS = 60.0
_NCCL_FILE = re.compile(r"libnccl\.so\.(\d+\.\d+\.\d+)")


def look_at_software(environment: Mapping[str, str], driver: Path = DRIVER) -> Software:
    """Versions, without importing what is not imported already (but torch, for its CUDA and NCCL)."""
    torch_cuda = nccl = None
    torch_version = _version("torch")
    if torch_version is not None:
        import torch

        torch_cuda = torch.version.cuda
        if torch_cuda is not None and torch.distributed.is_nccl_available():
            nccl = ".".join(str(part) for part in torch.cuda.nccl.version())
    return Software(
        platform.python_version(),
        torch_version,
        torch_cuda,
        _version("ray"),
        _version("transformers"),
        nccl,
        nccl_before_torch(environment),
        driver_version(driver),
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def driver_version(driver: Path = DRIVER) -> str | None:
    """The kernel module's version; None without one."""
    try:
        found = re.search(r"Kernel Module.*?\s(\d+\.\d+(\.\d+)?)\s", driver.read_text())
    except OSError:
        return None
    return found.group(1) if found else None


def nccl_before_torch(environment: Mapping[str, str]) -> dict[str, str]:
    """NCCL libraries that the dynamic linker takes before the one in torch's wheel: file -> its version."""
    files = [Path(part) for part in re.split(r"[ :]", environment.get("LD_PRELOAD", "")) if part]
    folders = [Path(part) for part in environment.get("LD_LIBRARY_PATH", "").split(":") if part]
    files += [folder / "libnccl.so.2" for folder in folders]
    found = {}
    for file in files:
        version = _NCCL_FILE.search(os.path.realpath(file))
        if version is not None and file.exists():
            found[str(file)] = version.group(1)
    return found


def count_gpus() -> int | None:
    """GPUs that this process may use; torch asks the driver's library, without starting CUDA."""
    if _version("torch") is None:
        return None
    import torch

    return torch.cuda.device_count()


def look_at_gpus() -> tuple[Gpu, ...]:
    """What nvidia-smi says of the GPUs of this machine, and a short matmul on each; () without them."""
    answer = _run(["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"])
    if answer is None or answer.returncode != 0:
        return ()
    gpus = parse_nvidia_smi(answer.stdout)
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # number them as nvidia-smi does
    tried = _run([sys.executable, "-m", "verl.doctor.gpu_probe"], environment)
    return with_matmul(gpus, tried)


def with_matmul(gpus: tuple[Gpu, ...], tried: subprocess.CompletedProcess[str] | None) -> tuple[Gpu, ...]:
    """The GPUs with what `gpu_probe` printed."""
    if tried is None:
        return tuple(replace(gpu, problem=f"no matmul within {SECONDS:.0f} s") for gpu in gpus)
    if tried.returncode != 0:
        last = (tried.stderr.strip().splitlines() or ["no word"])[-1]
        return tuple(replace(gpu, problem=f"the matmul's process ended: {last}") for gpu in gpus)
    said = json.loads(tried.stdout)
    return tuple(replace(gpu, **said.get(str(gpu.index), {})) for gpu in gpus)


def parse_nvidia_smi(text: str) -> tuple[Gpu, ...]:
    """From its CSV in the order of QUERY; "[N/A]" and "[Not Supported]" are not known."""
    gpus = []
    for line in text.strip().splitlines():
        index, uuid, name, total, used, ecc, pages, rows = (part.strip() for part in line.split(","))
        gpus.append(
            Gpu(
                int(index),
                uuid,
                name,
                (int(total) if total.isdigit() else 0) * 2**20,
                (int(used) if used.isdigit() else 0) * 2**20,
                int(ecc) if ecc.isdigit() else None,
                needs_reset="yes" in (pages.lower(), rows.lower()),
            )
        )
    return tuple(gpus)


def _run(
    command: list[str], environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str] | None:
    """None: there is no such program, or it takes too long (a driver that hangs)."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=SECONDS, env=environment, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
