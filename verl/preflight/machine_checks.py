"""The checks of each machine of a run.

They look at folders, limits, servers and the way to them, network cards, and GPUs.
"""

from __future__ import annotations

import ipaddress
import json
import os
import resource
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies_environment

import psutil
import torch
from huggingface_hub import constants

from verl.code_server.client import URL_VARIABLE
from verl.code_server.walls import Limits, NoWalls, choose_walls
from verl.config import Config
from verl.config.mixture import sources_of
from verl.data.row_programs import CODE_ENVIRONMENTS, CODE_VERIFIERS
from verl.planning.hardware import memory_of_machine, read_text
from verl.preflight.target import (
    Finding,
    Target,
    error,
    existing_parent,
    port_holder,
    ray_folder,
    warning,
    write_problem,
)
from verl.utils.device import loaded_nccl
from verl.utils.text import format_bytes

HOME_BYTES = 1e9
BASE_FILES = 256  # the open files of a run in one process
RAY_FILES = 4096  # the open files of a run on Ray
STORE_SHARE = 0.3  # the share of the memory that Ray gives its object store
STORE_BYTES = 10e9  # the most bytes that Ray gives its object store
DRIVER = Path("/proc/driver/nvidia/version")
RUN_PROGRAMS = CODE_ENVIRONMENTS | CODE_VERIFIERS
SMI_SECONDS = 20.0  # what nvidia-smi may take; without persistence mode it loads the driver first
LOST_GPU = ("GPU is lost", "Unknown Error")  # what nvidia-smi says of a GPU that has left the bus
BUSY_SHARE = 0.1  # the share of a GPU's memory that others may hold


def find_places_that_can_not_be_written(target: Target) -> Iterator[Finding]:
    """Find folders of the run that are full, over quota, read-only or not the user's."""
    folders = []
    if target.run_folder:
        do = "trainer.default_local_dir=<folder on a file system with room>"
        folders.append(("run folder", target.run_folder, "nothing of the run could be kept", do))
    if not target.has_models:
        do = "export HF_HOME=<folder on a file system with room>"
        folders.append(("models from the hub", constants.HF_HUB_CACHE, "the model could not be fetched", do))
    if target.cluster is not None:
        do = "export RAY_TMPDIR=<folder on a local disk with a short path>"
        folders.append(("Ray's files", ray_folder(), "Ray would not start", do))
    for used_for, path, why, do in folders:
        if (problem := write_problem(path)) is not None:
            yield error(f"{used_for}: {path} can't be written ({problem})", why, do)


def find_full_home(target: Target) -> Iterator[Finding]:
    """Find a home folder that is full or over quota."""
    problem = write_problem("~")
    free = shutil.disk_usage(existing_parent("~")).free
    if problem is not None or free < HOME_BYTES:
        state = f"can't be written ({problem})" if problem else f"has {free / 1e6:.0f} MB left"
        yield warning(
            f"the home folder {state}",
            "models from the hub, wandb, compiled kernels and logins are kept there, and fail in mid-run",
            "export HF_HOME=/<disk>/hf XDG_CACHE_HOME=/<disk>/cache WANDB_CACHE_DIR=/<disk>/wandb "
            "TRITON_CACHE_DIR=/<disk>/triton, or make room: du -xsh ~/.cache/*",
        )


def find_full_ray_disk(target: Target) -> Iterator[Finding]:
    """Find a disk of Ray's files that is more than 95 % full."""
    total, used, _ = shutil.disk_usage(existing_parent(ray_folder()))
    if target.needs_ray and used > 0.95 * total:
        yield warning(
            f"{ray_folder()}, where Ray keeps its files, is {100 * used / total:.0f} % full",
            "above 95 % Ray refuses to move objects to disk, and tasks fail",
            "export RAY_TMPDIR=<folder on a local disk with room>",
        )


def find_paths_missing_on_nodes(target: Target) -> Iterator[Finding]:
    """Find models that a node of the cluster does not have at the same path."""
    for path in target.model_folders:
        if not Path(path).exists():
            do = f"copy it to the same path on every node: rsync -a {path} <node>:{path}"
            yield error(f"{path} is not there", "the processes on this node could not load it", do)


def find_few_open_files(target: Target) -> Iterator[Finding]:
    """Find a limit of open files (`ulimit -n`) below the number that the run opens."""
    config = target.config
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Ray itself raises the soft limit.
    needed, allowed = (RAY_FILES, hard) if target.needs_ray else (BASE_FILES, soft)
    if isinstance(config, Config) and config.actor_rollout_ref.rollout.name == "remote":
        needed = needed + 2 * config.actor_rollout_ref.rollout.max_num_seqs
        allowed = soft
    if allowed < needed:
        advice = f" (more than {hard}: the administrator, in limits.conf or LimitNOFILE=)"
        yield warning(
            f"`ulimit -n` allows {allowed} open files, {needed} may be needed",
            "connections and worker processes fail with 'Too many open files', often hours later",
            f"ulimit -n {min(needed, hard)}" + advice * (hard < needed),
        )


def find_cpus_counted_wrong(target: Target) -> Iterator[Finding]:
    """Find that Ray counts more cores than the affinity allows."""
    if not target.needs_ray:
        return
    from verl.single_controller.ray.session import cores_for_ray

    own_addresses = {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}
    nodes = target.cluster.alive if target.cluster is not None else []
    listed = [node.num_cpus for node in nodes if node.address in own_addresses]
    counted = listed[0] if listed else cores_for_ray()
    allowed = len(os.sched_getaffinity(0))
    if counted > allowed:
        yield warning(
            f"Ray counts {counted:.0f} cores, this job may use {allowed}",
            "it starts that many processes at once, and all of them share the few cores",
            f"ray start ... --num-cpus={allowed} (with `--head` on this machine, and export "
            "RAY_ADDRESS=<it>:6379)",
        )


def find_small_shm(target: Target) -> Iterator[Finding]:
    """Find a /dev/shm that is too small for Ray's object store."""
    if not target.needs_ray:
        return
    free = shutil.disk_usage("/dev/shm").free
    store_bytes = min(STORE_SHARE * memory_of_machine(), STORE_BYTES)
    if free < store_bytes:
        size = -(-int(store_bytes) // 10**9)
        yield warning(
            f"/dev/shm has {format_bytes(free)} free, Ray's object store wants {format_bytes(store_bytes)}",
            "Ray keeps its objects on disk instead, and every batch goes through files",
            f"docker run --shm-size={size}g ..., or mount -o remount,size={size}g /dev/shm",
        )


def find_too_many_threads(target: Target) -> Iterator[Finding]:
    """Find more threads (OMP_NUM_THREADS times the processes of a machine) than cores."""
    config = target.config
    text = os.environ.get("OMP_NUM_THREADS", "")
    allowed = len(os.sched_getaffinity(0))
    processes = 1 if config is None or torch.cuda.device_count() else config.trainer.n_gpus_per_node
    if processes > 1 and text.isdigit() and int(text) > 1 and int(text) * processes > allowed:
        yield warning(
            f"OMP_NUM_THREADS={text} for each of {processes} processes, on {allowed} cores",
            "with more busy threads than cores a process is 3 to 5 times slower",
            f"export OMP_NUM_THREADS={max(1, allowed // processes)}",
        )


def find_no_walls_for_programs(target: Target) -> Iterator[Finding]:
    """Find a run that tests programs on this machine, although no sandbox can be built for them."""
    config = target.config
    if not isinstance(config, Config) or config.verifiers.code.api_url or os.environ.get(URL_VARIABLE):
        return
    sources = sources_of(config, with_data=False)
    names = {
        config.environment.env_class,
        *(name for source in sources for name in (source.env_class, source.verifier)),
    }
    served = {
        name for name, settings in config.environment.env_config.items() if "code_api_url" in (settings or {})
    }
    if used := [name for name in sorted(RUN_PROGRAMS - served) if name in names]:
        try:
            choose_walls("auto", Limits()).close()
        except NoWalls as problem:
            what = f"{', '.join(used)}: this machine can't build the walls around a program: {problem}"
            do = "as it says, or verifiers.code.api_url=http://<a machine with a code server>:1234"
            yield error(what, "no program could be tested, and all its trajectories would be left out", do)


# -------------------------------------------------------------------------------- retrieval servers


def find_proxies_in_the_way(target: Target) -> Iterator[Finding]:
    """Find a proxy of the environment that would catch requests to a retrieval server of this network."""
    proxies = getproxies_environment()
    for server in target.servers:
        split = urlsplit(server.url)
        proxy = proxies.get(split.scheme) or proxies.get("all")
        host = split.hostname or ""
        is_inside = "." not in host or any(
            ipaddress.ip_address(address).is_private for address in server.addresses
        )
        # Programs differ in which spelling and which patterns they understand. All understand an exact name.
        blind = [
            name
            for name in ("NO_PROXY", "no_proxy")
            if not {host, "*"} & {entry.strip() for entry in os.environ.get(name, "").split(",")}
        ]
        if proxy and is_inside and blind:
            yield warning(
                f"the proxy {proxy.rpartition('@')[2]} would catch requests to {server.url}: "
                f"{' and '.join(blind)} {'do' if len(blind) > 1 else 'does'} not hold {host}",
                "the trainer goes around it unless retriever.use_proxy=true, your reward function may not",
                f'export NO_PROXY="${{NO_PROXY:+$NO_PROXY,}}{host}" && export no_proxy="$NO_PROXY"',
            )


def find_silent_servers(target: Target) -> Iterator[Finding]:
    """Find retrieval servers that don't answer, or are not ready."""
    silent = [server for server in target.servers if server.problem is not None]
    for server in silent:
        split = urlsplit(server.url)
        what = f"retriever.url={server.url} does not answer searches: {server.problem}"
        if server.health.get("status") == "loading":
            what = f"retriever.url={server.url} is still loading ({server.health.get('progress', '')})"
        do = f"on {split.hostname}: bash retrieval_launch.sh"
        if not server.addresses:
            do = f"look whether {split.hostname} is the right name"
        elif server.is_here:
            do = "bash retrieval_launch.sh"
            port = split.port or 80
            holder = port_holder(port)
            if holder is not None and not server.health:
                what = f"port {port} of this machine is held by {holder}, no retrieval server: {what}"
                do += f" --port {port + 1} and retriever.url=http://127.0.0.1:{port + 1}/retrieve"
        if len(silent) < len(target.servers):
            why = "the other servers have to do its work"
            yield warning(what, why, f"{do}, or take it out of retriever.url")
        else:
            why = "no trajectory could search, and all would be left out"
            do += ", or do_search=false to train without a search engine, or (if these are not searches) "
            do += "environment.env_class, or a column env_class in training and validation rows"
            yield error(what, why, do)


def find_wrong_corpora(target: Target) -> Iterator[Finding]:
    """Find servers with another corpus than retriever.corpus_path, or than each other."""
    config = target.config
    probe = target.probe
    if probe is None or not isinstance(config, Config) or not target.servers:
        return
    path = config.retriever.corpus_path
    answering = [server for server in target.servers if server.problem is None]
    if path is None:
        served = {
            json.dumps(server.corpus, sort_keys=True): server.url
            for server in answering
            if server.corpus is not None
        }
        if len(served) > 1:
            yield warning(
                f"the servers {' and '.join(served.values())} serve different corpora",
                "the same query finds other documents at each of them",
                "start all with one --corpus_path, or take the odd one out of retriever.url",
            )
        return
    try:
        meant = probe.corpus(path)
    except OSError as problem:
        yield error(
            f"retriever.corpus_path={path} can't be read ({problem.strerror})",
            "what the servers serve can't be compared with it",
            "retriever.corpus_path=<corpus.jsonl> as this machine sees it, or null",
        )
        return
    for server in answering:
        if server.corpus is None:
            yield warning(
                f"{server.url} does not say which corpus it serves, retriever.corpus_path={path} is meant",
                "answers from another corpus look like a policy that does not learn",
                "serve it with bash retrieval_launch.sh, or leave retriever.corpus_path out",
            )
        elif server.corpus != meant:
            yield error(
                f"{server.url} serves {server.health.get('corpus_path')} ({_describe(server.corpus)}), "
                f"retriever.corpus_path={path} ({_describe(meant)}) is meant",
                "the answers to the questions may not be in it",
                f"bash retrieval_launch.sh --corpus_path {path}",
            )


def _describe(corpus: dict[str, Any]) -> str:
    return f"{corpus['num_bytes']:,} bytes, hash {corpus['sample_sha256'][:12]}"


# -------------------------------------------------------------------------------- network cards, GPUs


def find_cards_that_are_not_there(target: Target) -> Iterator[Finding]:
    """Find a network card that NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME names and that does not exist."""
    states = psutil.net_if_stats()
    up = sorted(name for name in psutil.net_if_addrs() if name in states and states[name].isup)
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        text = os.environ.get(variable, "")
        # NCCL takes beginnings of names. "=" stands before exact names, and "^" before names to leave out.
        # gloo takes exact names.
        exact = variable.startswith("GLOO") or text.startswith("=")
        choices = text.lstrip("=").split(",")
        fits = any(name == choice if exact else name.startswith(choice) for name in up for choice in choices)
        if text and not text.startswith("^") and not fits:
            yield error(
                f"{variable}={text} names no card that is up ({', '.join(up)})",
                "the processes would not find each other",
                f"unset {variable}: the card with Ray's address is taken then",
            )


def find_shared_gpus(target: Target) -> Iterator[Finding]:
    """Find two ranks on one GPU."""
    entries = [entry.strip() for entry in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    if len(set(entries)) < len(entries):
        yield error(
            f"CUDA_VISIBLE_DEVICES={','.join(entries)} names a GPU twice",
            "two ranks would share it: NCCL refuses that, and memory runs out",
            f"export CUDA_VISIBLE_DEVICES={','.join(dict.fromkeys(entries))}",
        )
    if torch.cuda.device_count() and os.environ.get("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"):
        yield error(
            "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES is set",
            "Ray then gives no process a GPU of its own, and all of them take the first",
            "unset RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES (where Ray is started, too)",
        )


def find_unusable_cuda(target: Target) -> Iterator[Finding]:
    """Find a torch that can't use the GPU's driver: it is built without CUDA, or for a newer driver."""
    driver = read_text(DRIVER).splitlines()
    config = target.config
    is_wanted = config is None or config.trainer.device != "cpu"
    if driver and is_wanted and not torch.cuda.is_available() and "CUDA_VISIBLE_DEVICES" not in os.environ:
        built_for = f"with CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        yield error(
            f"torch {torch.__version__}, built {built_for}, sees no GPU beside the driver {driver[0]}",
            "the run would train on the CPU",
            "a torch for this driver's CUDA, a newer driver, or trainer.device=cpu to mean it",
        )


def find_busy_gpus(target: Target) -> Iterator[Finding]:
    """Find GPUs that others hold, or that can't be used."""
    for index in range(torch.cuda.device_count() if target.is_thorough else 0):
        try:
            free, total = torch.cuda.mem_get_info(index)
        except RuntimeError as problem:
            yield error(f"GPU {index} can't be used: {problem}", "no process could work on it")
            continue
        if free < (1 - BUSY_SHARE) * total:
            yield warning(
                f"GPU {index} has {format_bytes(total - free)} of {format_bytes(total)} in use already",
                "the run has less memory and less time on it than it counts on",
                f"nvidia-smi -i {index} shows by whom",
            )


def find_another_nccl(target: Target) -> Iterator[Finding]:
    """Find an NCCL that is loaded in the place of the one that torch was built with."""
    loaded = loaded_nccl()
    if loaded is None or torch.version.cuda is None:
        return
    built_with = tuple(torch.cuda.nccl.version())
    if loaded.version == built_with:
        return
    make = error if loaded.version < built_with else warning
    yield make(
        f"NCCL {_dotted(loaded.version)} is loaded from {loaded.path}, torch {torch.__version__} was built "
        f"with {_dotted(built_with)}",
        "collectives fail or hang where the older one lacks what torch asks for, or where nodes differ",
        "unset LD_PRELOAD, and take its folder out of LD_LIBRARY_PATH (module unload nccl); or mean it, on "
        "all nodes: trainer.doctor_skip=[nccl]",
    )


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def find_memory_errors(target: Target) -> Iterator[Finding]:
    """Find GPUs whose memory has failed: uncorrected ECC errors, rows and pages that wait for a reset."""
    if not target.is_thorough or shutil.which("nvidia-smi") is None:
        return
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]
    try:
        failed, waiting = memory_errors()
    except (subprocess.TimeoutExpired, RuntimeError) as problem:
        silence = f"nvidia-smi does not answer within {SMI_SECONDS:g} s"
        finding = error(
            f"nvidia-smi says: {problem}" if isinstance(problem, RuntimeError) else silence,
            "a GPU is lost or its driver hangs, and so would the run",
            f"sbatch --exclude={node} ..., and tell the administrators",
        )
        yield replace(finding, exclude=node)
        return
    for index, reasons in failed.items():
        finding = error(
            f"GPU {index} of {node} has {', '.join(reasons)}",
            "a process on it ends with 'uncorrectable ECC error', or has already",
            f"sbatch --exclude={node} ..., and tell the administrators (nvidia-smi -i {index} -q -d ECC)",
        )
        yield replace(finding, exclude=node)
    for index, reasons in waiting.items():
        if index not in failed:
            yield warning(
                f"GPU {index} of {node} has {', '.join(reasons)}",
                "its memory has failed in one place, which is only replaced when the GPU is reset",
                f"sbatch --exclude={node} ..., or have it reset: nvidia-smi --gpu-reset -i {index}",
            )


def memory_errors() -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return what nvidia-smi says of the memory of the GPUs.

    Returns:
        For the GPUs (by their index) that are broken, and for those that wait for a reset, the reasons.

    Raises:
        subprocess.TimeoutExpired: If it does not answer.
        RuntimeError: If it says that a GPU is lost.
    """
    failed: dict[str, list[str]] = {}
    waiting: dict[str, list[str]] = {}
    index_of = {}
    fields = "index,gpu_bus_id,ecc.errors.uncorrected.volatile.total,retired_pages.pending"
    for index, bus_id, uncorrected, pending in _ask_nvidia_smi(f"--query-gpu={fields}", 4):
        index_of[bus_id] = index
        if uncorrected.isdigit() and int(uncorrected):
            reason = f"{uncorrected} uncorrected ECC errors since the driver was loaded"
            failed.setdefault(index, []).append(reason)
        if pending == "Yes":
            waiting.setdefault(index, []).append("memory pages that wait for their retirement")
    fields = "gpu_bus_id,remapped_rows.pending,remapped_rows.failure"
    for bus_id, pending, failure in _ask_nvidia_smi(f"--query-remapped-rows={fields}", 3):
        index = index_of.get(bus_id, bus_id)
        if failure in ("Yes", "1"):
            failed.setdefault(index, []).append("memory rows that could not be replaced")
        if pending in ("Yes", "1"):
            waiting.setdefault(index, []).append("memory rows that wait for their replacement")
    return failed, waiting


def _ask_nvidia_smi(query: str, num_fields: int) -> list[list[str]]:
    """Return the rows of a query. They are none if this nvidia-smi does not know it, or finds no driver.

    Raises RuntimeError if it says that a GPU is lost.
    """
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_SECONDS)
    for line in (done.stdout + done.stderr).splitlines():
        if done.returncode and any(words in line for words in LOST_GPU):
            raise RuntimeError(line.strip().rstrip("."))
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return [row for row in rows if len(row) == num_fields] if done.returncode == 0 else []


MACHINE_CHECKS: dict[str, Callable[[Target], Iterator[Finding]]] = {
    "writable": find_places_that_can_not_be_written,
    "home": find_full_home,
    "ray-disk": find_full_ray_disk,
    "shared-paths": find_paths_missing_on_nodes,
    "open-files": find_few_open_files,
    "cpus": find_cpus_counted_wrong,
    "shm": find_small_shm,
    "threads": find_too_many_threads,
    "code-sandbox": find_no_walls_for_programs,
    "proxy": find_proxies_in_the_way,
    "retriever": find_silent_servers,
    "corpus": find_wrong_corpora,
    "network-card": find_cards_that_are_not_there,
    "gpu-shared": find_shared_gpus,
    "cuda": find_unusable_cuda,
    "gpu-health": find_busy_gpus,
    "gpu-ecc": find_memory_errors,
    "nccl": find_another_nccl,
}
