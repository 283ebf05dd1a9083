"""Checks of each machine of a run: folders, limits, servers and the way to them, network cards, GPUs."""

from __future__ import annotations

import ipaddress
import json
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies_environment

import torch

from verl.preflight.findings import Finding, check, error, warning
from verl.preflight.machine import (
    VIRTUAL_CARDS,
    Machine,
    driver_version,
    existing_parent,
    memory_of_machine,
    port_holder,
    problem_of_writing,
)
from verl.preflight.target import local_folder

HOME_BYTES = 1e9
BASE_FILES, RAY_FILES = 256, 4096  # open files of a run in one process, and on Ray
STORE_SHARE, STORE_BYTES = 0.3, 10e9  # what Ray gives its object store: of the memory, and all the same below
OLDEST_DRIVER = {"11": (450, 80), "12": (525, 60), "13": (580, 65)}  # by CUDA's major version
BUSY_SHARE = 0.1  # of a GPU's memory that others may hold


def _is_run(machine: Machine) -> bool:
    return machine.target.config is not None


def _has_servers(machine: Machine) -> bool:
    return bool(machine.servers)


@check("writable", lambda machine: _is_run(machine) or machine.target.cluster, on_machines=True)
def find_places_that_can_not_be_written(machine: Machine) -> Iterator[Finding]:
    """folders of the run that are full, over quota, read-only or not the user's"""
    from huggingface_hub import constants

    target, places = machine.target, []
    if target.run_folder:
        do = "trainer.default_local_dir=<folder on a file system with room>"
        places.append(("run folder", target.run_folder, "nothing of the run could be kept", do))
    if not all(map(local_folder, target.models.values())):
        do = "export HF_HOME=<folder on a file system with room>"
        places.append(("models from the hub", constants.HF_HUB_CACHE, "the model could not be fetched", do))
    if target.cluster is not None:
        do = "export RAY_TMPDIR=<folder on a local disk with a short path>"
        places.append(("Ray's files", machine.ray_folder, "Ray would not start", do))
    for used_for, path, why, do in places:
        if (problem := problem_of_writing(path)) is not None:
            yield error(f"{used_for}: {path} can't be written ({problem})", why, do)


@check("home", on_machines=True)
def find_full_home(machine: Machine) -> Iterator[Finding]:
    """a home folder that is full or over quota"""
    problem, free = problem_of_writing("~"), shutil.disk_usage(existing_parent("~")).free
    if problem is not None or free < HOME_BYTES:
        state = f"can't be written ({problem})" if problem else f"has {free / 1e6:.0f} MB left"
        yield warning(
            f"the home folder {state}",
            "models from the hub, wandb, compiled kernels and logins are kept there, and fail in mid-run",
            "export HF_HOME=/<disk>/hf XDG_CACHE_HOME=/<disk>/cache WANDB_CACHE_DIR=/<disk>/wandb "
            "TRITON_CACHE_DIR=/<disk>/triton, or make room: du -xsh ~/.cache/*",
        )


@check("ray-disk", lambda machine: machine.target.needs_ray, on_machines=True)
def find_full_ray_disk(machine: Machine) -> Iterator[Finding]:
    """the disk of Ray's files more than 95 % full"""
    total, used, _ = shutil.disk_usage(existing_parent(machine.ray_folder))
    if used > 0.95 * total:
        yield warning(
            f"{machine.ray_folder}, where Ray keeps its files, is {100 * used / total:.0f} % full",
            "above 95 % Ray refuses to move objects to disk, and tasks fail",
            "export RAY_TMPDIR=<folder on a local disk with room>",
        )


@check("shared-paths", lambda machine: machine.target.model_folders, on_machines=True)
def find_paths_missing_on_nodes(machine: Machine) -> Iterator[Finding]:
    """models that a node of the cluster does not have at the same path"""
    for path in machine.target.model_folders:
        if not Path(path).exists():
            yield error(
                f"{path} is not there",
                "the processes on this node could not load it",
                f"copy it to the same path on every node, or to a folder that all share: rsync -a {path} "
                f"<node>:{path}",
            )


@check("open-files", on_machines=True)
def find_few_open_files(machine: Machine) -> Iterator[Finding]:
    """`ulimit -n` below what the run opens"""
    target, (soft, hard) = machine.target, resource.getrlimit(resource.RLIMIT_NOFILE)
    # Ray raises the soft limit itself
    needed, allowed = (RAY_FILES, hard) if target.needs_ray else (BASE_FILES, soft)
    if target.is_policy_run:
        rollout = target.config.actor_rollout_ref.rollout  # type: ignore[union-attr]
        if rollout.placement == "apart":
            needed, allowed = needed + 2 * rollout.max_num_seqs, soft
    if allowed < needed:
        do = f"ulimit -n {min(needed, hard)}"
        if hard < needed:
            do += f" (more than {hard}: the administrator, in limits.conf or LimitNOFILE=)"
        yield warning(
            f"`ulimit -n` allows {allowed} open files, {needed} may be needed",
            "connections and worker processes fail with 'Too many open files', often hours later",
            do,
        )


@check("cpus", lambda machine: machine.target.needs_ray, on_machines=True)
def find_cpus_counted_wrong(machine: Machine) -> Iterator[Finding]:
    """more cores counted by Ray than the control group or the affinity allows"""
    counted = machine.cpus_of_ray
    if counted >= machine.num_cpus + 1:
        yield warning(
            f"Ray counts {counted:.0f} cores, this job may use {machine.num_cpus:.3g}",
            "it starts that many processes at once, and all of them share the few cores",
            f"ray start ... --num-cpus={max(1, int(machine.num_cpus))} "
            "(with `--head` on this machine, and export RAY_ADDRESS=<it>:6379)",
        )


@check("shm", lambda machine: machine.target.needs_ray, on_machines=True)
def find_small_shm(machine: Machine) -> Iterator[Finding]:
    """/dev/shm too small for Ray's object store"""
    free, wanted = shutil.disk_usage("/dev/shm").free, min(STORE_SHARE * memory_of_machine(), STORE_BYTES)
    if free < wanted:
        size = -(-int(wanted) // 10**9)
        yield warning(
            f"/dev/shm has {free / 1e9:.1f} GB free, Ray's object store wants {wanted / 1e9:.1f} GB",
            "Ray keeps its objects on disk instead, and every batch goes through files",
            f"docker run --shm-size={size}g ..., or mount -o remount,size={size}g /dev/shm, or rm what "
            "is left there",
        )


@check("threads", _is_run, on_machines=True)
def find_too_many_threads(machine: Machine) -> Iterator[Finding]:
    """OMP_NUM_THREADS times the processes of a machine above its cores"""
    config, text = machine.target.config, machine.environment.get("OMP_NUM_THREADS", "")
    processes = config.trainer.n_gpus_per_node  # type: ignore[union-attr]
    if machine.num_gpus or not text.isdigit() or processes == 1 or int(text) == 1:
        return
    if int(text) * processes > machine.num_cpus:
        yield warning(
            f"OMP_NUM_THREADS={text} for each of {processes} processes, on {machine.num_cpus:.3g} cores",
            "with more busy threads than cores a process is 3 to 5 times slower",
            f"export OMP_NUM_THREADS={max(1, int(machine.num_cpus) // processes)}",
        )


# -------------------------------------------------------------------------------- retrieval servers


@check("proxy", _has_servers, on_machines=True)
def find_proxies_in_the_way(machine: Machine) -> Iterator[Finding]:
    """a proxy of the environment that would catch requests to a retrieval server of this network"""
    proxies = getproxies_environment()
    for server in machine.servers:
        split = urlsplit(server.url)
        proxy, host = proxies.get(split.scheme) or proxies.get("all"), split.hostname or ""
        is_inside = "." not in host or any(ipaddress.ip_address(a).is_private for a in server.addresses)
        # programs differ in which spelling and which patterns they understand; all understand an exact name
        blind = [
            name
            for name in ("NO_PROXY", "no_proxy")
            if not {host, "*"} & {entry.strip() for entry in machine.environment.get(name, "").split(",")}
        ]
        if proxy and is_inside and blind:
            uses_it = machine.target.config.retriever.use_proxy  # type: ignore[union-attr]
            yield warning(
                f"the proxy {proxy.rpartition('@')[2]} would catch requests to {server.url}: "
                f"{' and '.join(blind)} {'do' if len(blind) > 1 else 'does'} not hold {host}",
                "searches may go to the proxy (retriever.use_proxy=true)"
                if uses_it
                else "the trainer goes around it (retriever.use_proxy=false), but your reward function, curl "
                "and other programs would ask the proxy",
                f'export NO_PROXY="${{NO_PROXY:+$NO_PROXY,}}{host}" && export no_proxy="$NO_PROXY"',
            )


@check("retriever", _has_servers, on_machines=True)
def find_silent_servers(machine: Machine) -> Iterator[Finding]:
    """retrieval servers that don't answer, or are not ready"""
    silent = [server for server in machine.servers if server.problem is not None]
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
            holder = port_holder(split.port or 80)
            if holder is not None and not server.health:
                port = (split.port or 80) + 1
                what = f"port {port - 1} of this machine is held by {holder}, no retrieval server: {what}"
                do += f" --port {port} and retriever.url=http://127.0.0.1:{port}/retrieve"
        if len(silent) < len(machine.servers):
            yield warning(
                what, "the other servers have to do its work", f"{do}, or take it out of retriever.url"
            )
        else:
            why = "no trajectory could search, and all would be left out"
            yield error(what, why, f"{do}, or do_search=false to train without a search engine")


@check("corpus", _has_servers, on_machines=True)
def find_wrong_corpora(machine: Machine) -> Iterator[Finding]:
    """servers with another corpus than is meant (retriever.corpus_path), or than each other"""
    target, path = machine.target, machine.target.config.retriever.corpus_path  # type: ignore[union-attr]
    answering = [server for server in machine.servers if server.problem is None]
    served = {json.dumps(one.corpus, sort_keys=True): one.url for one in answering if one.corpus is not None}
    if path is None:
        if len(served) > 1:
            yield warning(
                f"the servers {' and '.join(served.values())} serve different corpora",
                "the same query finds other documents at each of them",
                "start all with one --corpus_path, or take the odd one out of retriever.url",
            )
        return
    try:
        meant = target.probe.corpus(path)  # type: ignore[union-attr]
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


@check("network-card", lambda machine: machine.target.has_several_nodes, on_machines=True)
def find_cards_to_choose_from(machine: Machine) -> Iterator[Finding]:
    """several network cards without a chosen one, or a chosen one that is not there"""
    cards = {n: address for n, address in machine.cards.items() if not n.startswith(VIRTUAL_CARDS)}
    names, is_chosen = {*machine.cards, "lo"}, False
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        chosen = machine.environment.get(variable, "")
        is_chosen = is_chosen or bool(chosen)
        # NCCL takes beginnings of names, "=" before exact ones, "^" before those left out; gloo exact names
        exact, wanted = variable.startswith("GLOO") or chosen.startswith("="), chosen.lstrip("=").split(",")
        fits = any(name == one if exact else name.startswith(one) for name in names for one in wanted)
        if chosen and not chosen.startswith("^") and not fits:
            yield error(
                f"{variable}={chosen} names no card that is up ({', '.join(sorted(names))})",
                "the processes would not find each other",
                f"export {variable}={next(iter(cards), '<card>')}",
            )
    if len(cards) > 1 and not is_chosen:
        shown = ", ".join(f"{name} ({address})" for name, address in cards.items())
        last = list(cards)[-1]
        yield warning(
            f"several network cards, and none is chosen: {shown}",
            "weights and gradients go over the card with Ray's address, which need not be the fast one",
            "ray start --node-ip-address=<address of the fast card> on each node, or export "
            f"NCCL_SOCKET_IFNAME={last} GLOO_SOCKET_IFNAME={last}",
        )


@check("gpu-shared", on_machines=True)
def find_shared_gpus(machine: Machine) -> Iterator[Finding]:
    """two ranks on one GPU"""
    visible = machine.environment.get("CUDA_VISIBLE_DEVICES", "")
    entries = [entry.strip() for entry in visible.split(",") if entry.strip()]
    if len(set(entries)) < len(entries):
        yield error(
            f"CUDA_VISIBLE_DEVICES={visible} names a GPU twice",
            "two ranks would share it: NCCL refuses that, and memory runs out",
            f"export CUDA_VISIBLE_DEVICES={','.join(dict.fromkeys(entries))}",
        )
    if machine.num_gpus and machine.environment.get("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"):
        yield error(
            "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES is set",
            "Ray then gives no process a GPU of its own, and all of them take the first",
            "unset RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES (where Ray is started, too)",
        )


@check("cuda", on_machines=True)
def find_unusable_cuda(machine: Machine) -> Iterator[Finding]:
    """a driver too old for torch's CUDA, or a torch without CUDA beside a GPU"""
    config, driver, cuda = machine.target.config, driver_version(), torch.version.cuda
    if driver is None or (config is not None and config.trainer.device == "cpu"):
        return
    if cuda is None:
        yield warning(
            f"this machine has an NVIDIA driver, torch {torch.__version__} is built without CUDA",
            "the run would train on the CPU",
            "pip install torch --force-reinstall (the wheel with CUDA), or trainer.device=cpu to mean it",
        )
        return
    oldest = OLDEST_DRIVER.get(cuda.split(".")[0], (0, 0))
    if tuple(int(part) for part in driver.split(".")[:2]) < oldest:
        yield error(
            f"the driver {driver} is too old for torch {torch.__version__} with CUDA {cuda}, which needs "
            f"{oldest[0]}.{oldest[1]} or newer",
            "torch would see no GPU",
            "a newer driver (the administrator), or a torch for an older CUDA",
        )


@check("gpu-health", lambda machine: machine.target.is_thorough and machine.num_gpus, on_machines=True)
def find_busy_gpus(machine: Machine) -> Iterator[Finding]:
    """GPUs that others hold, or that can't be used"""
    for index in range(machine.num_gpus):
        try:
            free, total = torch.cuda.mem_get_info(index)
        except RuntimeError as problem:
            yield error(f"GPU {index} can't be used: {problem}", "no process could work on it")
            continue
        if free < (1 - BUSY_SHARE) * total:
            yield warning(
                f"GPU {index} has {(total - free) / 1e9:.1f} of {total / 1e9:.1f} GB in use already",
                "the run has less memory and less time on it than it counts on",
                f"nvidia-smi -i {index} shows by whom",
            )
