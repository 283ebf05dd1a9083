"""The environment variables that a worker gets, and where they come from.

    driver's environment --(CARRIED)------> runtime environment of each actor, set before its Python starts
                         --(SECRETS)------> the call that makes the worker: in no log of Ray's
                         --(DRIVER_ONLY)--> nowhere, also where a worker would inherit it
    node's environment   -----------------> whatever the driver has not set
    node's address       -----------------> GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME, unless set
    command of verl.rl   --(all of it, by the call; but NODES_OWN)--> orchestrator

A worker inherits from the process that was started on its node (`ray start`), not from the driver. Variables
on which a run depends are therefore carried by name. CUDA_VISIBLE_DEVICES is Ray's to set.
"""

from __future__ import annotations

import os
import re
import sys

import psutil

# Ray's own behaviour, in the driver and on nodes that scripts/ray_node.sh starts. What the user set stays.
RAY_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",  # no reports to the outside
    "RAY_AUTH_MODE": "disabled",  # otherwise Ray writes a token into the home directory
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # actors run in the driver's environment, not in one that uv makes
    "RAY_gcs_server_port_wait_time_s": "180",  # of a busy machine; Ray's own is 30
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",  # when one rank dies, the others' errors say nothing more
}
# Ray reads some of them when it is imported, after this file.
for _name, _value in RAY_SETTINGS.items():
    os.environ.setdefault(_name, _value)

# Carried by name: the hub's cache, proxies and their certificates, collectives, vLLM, libraries that come
# first (another NCCL, say), CUDA, threads.
CARRIED = re.compile(
    r"HF_(HOME|HUB_CACHE|ENDPOINT|HUB_OFFLINE|DATASETS_OFFLINE)|TRANSFORMERS_OFFLINE|NO_PROXY|no_proxy|"
    r"SSL_CERT_FILE|REQUESTS_CA_BUNDLE|(GLOO|TP)_SOCKET_IFNAME|(TORCH_)?NCCL_\w+|VLLM_\w+|"
    r"LD_PRELOAD|CUDA_(DEVICE_MAX_CONNECTIONS|LAUNCH_BLOCKING|MODULE_LOADING)|CUBLAS_WORKSPACE_CONFIG|"
    r"PYTORCH_(CUDA_)?ALLOC_CONF|TOKENIZERS_PARALLELISM|PYTHONUNBUFFERED|VERL_LOGGING_LEVEL"
)
# Ray logs runtime environments, so these go another way; so do proxies, whose address may hold a password.
SECRETS = re.compile(
    r"HF_TOKEN|HUGGING_FACE_HUB_TOKEN|VLLM_API_KEY|ROLLOUT_API_KEY|(?i:(http|https|all)_proxy)"
)
DRIVER_ONLY = ("WANDB_API_KEY",)
PROCESS_NAME = "VERL_PROCESS"  # set in a process of a run to its name, such as "quickstart/trainer-0"
# What an orchestrator does not take over from the command: it is Ray's, or its node's.
NODES_OWN = re.compile(r"RAY_(?!ADDRESS$)\w+|CUDA_VISIBLE_DEVICES|PYTHONPATH|PWD|OLDPWD|HOSTNAME")


def carried_variables() -> dict[str, str]:
    """Return the variables of the driver that workers need, without secrets."""
    secrets = secret_variables()
    carried = {name: value for name, value in os.environ.items() if CARRIED.fullmatch(name)}
    return {name: value for name, value in carried.items() if name not in secrets}


def secret_variables() -> dict[str, str]:
    """Return the secrets of the driver that workers need."""
    return {name: value for name, value in os.environ.items() if SECRETS.fullmatch(name)}


def command_variables() -> dict[str, str]:
    """Return the variables of a command for its orchestrator, which stands in for the command elsewhere."""
    return {name: value for name, value in os.environ.items() if not NODES_OWN.fullmatch(name)}


def import_path() -> str:
    """Return the folders beside Python's own from which the driver imports, so that actors do too."""
    python_folders = (sys.prefix, sys.base_prefix)
    return os.pathsep.join(
        os.path.abspath(folder) for folder in sys.path if not folder.startswith(python_folders)
    )


def card_of_address(address: str) -> str | None:
    """Return the name of this machine's network card with this IPv4 address, such as "eth0", or None."""
    cards = psutil.net_if_addrs().items()
    return next((card for card, entries in cards if address in (entry.address for entry in entries)), None)


def collective_variables(address: str) -> dict[str, str]:
    """Return variables that make gloo and NCCL meet on the network card that Ray uses on this node.

    Variables that are set already are left out, so that they stay. By default gloo takes the card to which
    the host's name resolves (on many systems the loopback), and NCCL any card that is up.
    """
    card = card_of_address(address)
    if card is None or card == "lo":
        return {}
    variables = {"GLOO_SOCKET_IFNAME": card, "NCCL_SOCKET_IFNAME": f"={card}"}  # "=": this name exactly
    return {name: value for name, value in variables.items() if not os.environ.get(name)}
