"""Checks of the retrieval servers, of the way to them, and of what they serve."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterator
from urllib.parse import urlsplit

from verl.doctor import needs
from verl.doctor.facts import Facts, Machine, Server
from verl.doctor.findings import Finding, error, warning
from verl.doctor.proxies import httpx_goes_around, is_inside, proxy_for, requests_goes_around
from verl.doctor.registry import check_each

_WITHOUT = "do_search=false to train without a search engine"


@check_each("proxy", needs.servers)
def find_proxies_in_the_way(facts: Facts, machine: Machine) -> Iterator[Finding]:
    """a proxy of the environment that would catch requests to a retrieval server of this network"""
    for server in machine.servers:
        host = urlsplit(server.url).hostname or ""
        proxy = proxy_for(server.url, machine.environment)
        if proxy is None or not is_inside(host, server.host_addresses):
            continue
        reasons = [
            reason for name in ("NO_PROXY", "no_proxy") if (reason := _not_spared(name, server, machine))
        ]
        if not reasons:
            continue
        do = f'export NO_PROXY="${{NO_PROXY:+$NO_PROXY,}}{host}" && export no_proxy="$NO_PROXY"'
        what = f"the proxy {proxy} would catch requests to {server.url}: {'; '.join(reasons)}"
        caught = not httpx_goes_around(server.url, _in_force(machine))
        if facts.run is not None and facts.run["retriever.use_proxy"] and caught:
            why = "searches go to the proxy (retriever.use_proxy=true), which does not know this network"
            yield error(what, why, f"{do}, or retriever.use_proxy=false")
        else:
            yield warning(
                what,
                "the trainer goes around it (retriever.use_proxy=false), but a reward function of yours, "
                "curl and "
                "other programs would ask the proxy"
                if facts.run is not None and not facts.run["retriever.use_proxy"]
                else "programs differ in which spelling they read, and some would ask the proxy",
                do,
            )


def _not_spared(name: str, server: Server, machine: Machine) -> str | None:
    """Why one spelling does not keep everybody's requests to a server away from the proxy."""
    if name not in machine.environment:
        return f"{name} is not set"
    value = machine.environment[name]
    host = urlsplit(server.url).hostname
    readers = {
        "httpx": httpx_goes_around(server.url, value),
        "requests": requests_goes_around(server.url, value),
    }
    blind = [reader for reader, spared in readers.items() if not spared]
    if not blind:
        return None
    if len(blind) == 2:
        return f"{name} does not hold {host}"
    entries = "a network, a port or a leading dot"
    return f"{name} spares {host} by an entry that {blind[0]} does not understand ({entries})"


def _in_force(machine: Machine) -> str:
    return machine.environment.get("no_proxy", machine.environment.get("NO_PROXY", ""))


@check_each("retriever", needs.servers)
def find_silent_servers(facts: Facts, machine: Machine) -> Iterator[Finding]:
    """retrieval servers that don't answer, or are not ready"""
    silent = [server for server in machine.servers if server.problem is not None]
    for server in silent:
        if server.holder is not None and not server.health:
            continue  # the check of ports says more
        what = f"retriever.url={server.url} does not answer searches: {server.problem}"
        if server.health.get("status") == "loading":
            what = f"retriever.url={server.url} is still loading ({server.health.get('progress', '')})"
        if len(silent) < len(machine.servers):
            yield warning(
                what,
                "the other servers have to do its work",
                f"{_how_to_start(server, machine)}, or take it out of retriever.url",
            )
        else:
            do = f"{_how_to_start(server, machine)}, or {_WITHOUT}"
            yield error(what, "no trajectory could search, and all would be left out", do)


def _how_to_start(server: Server, machine: Machine) -> str:
    host = urlsplit(server.url).hostname or ""
    if not server.host_addresses:
        return f"look whether {host} is the right name"
    here = any(
        address in machine.addresses or ipaddress.ip_address(address).is_loopback
        for address in server.host_addresses
    )
    return "bash retrieval_launch.sh" if here else f"on {host}: bash retrieval_launch.sh"


@check_each("port", needs.servers_or_ray)
def find_ports_in_use(facts: Facts, machine: Machine) -> Iterator[Finding]:
    """another program on the port of a retrieval server or of Ray"""
    for server in machine.servers:
        if server.problem is not None and server.holder is not None and not server.health:
            port = urlsplit(server.url).port or 80
            yield error(
                f"port {port} of this machine is held by {server.holder}, which does not answer as a "
                f"retrieval server ({server.problem})",
                f"searches at {server.url} fail, and a retrieval server can't start there",
                f"bash retrieval_launch.sh --port {port + 1} and "
                f"retriever.url=http://127.0.0.1:{port + 1}/retrieve",
            )
    ray = facts.ray
    if ray is not None and ray.problem is not None and ray.port_holder is not None and machine is facts.here:
        yield error(
            f"the port of RAY_ADDRESS={ray.address} is held by {ray.port_holder}, which is no Ray head node",
            "the run could not join a cluster, and a head node can't start there",
            f"export RAY_ADDRESS={ray.started[0]}"
            if ray.started
            else "bash scripts/ray_node.sh head --port 6380, and export RAY_ADDRESS=<this machine>:6380",
        )


@check_each("corpus", needs.servers)
def find_wrong_corpora(facts: Facts, machine: Machine) -> Iterator[Finding]:
    """servers with another corpus than is meant (retriever.corpus_path), or than each other"""
    said = {server.url: _identity(server) for server in machine.servers if server.problem is None}
    meant = facts.corpus
    for url, identity in said.items() if meant is not None and meant.identity is not None else ():
        assert meant is not None
        health = next(server.health for server in machine.servers if server.url == url)
        if identity is None:
            yield warning(
                f"{url} does not say which corpus it serves, retriever.corpus_path={meant.path} is meant",
                "answers from another corpus look like a policy that does not learn",
                "serve it with bash retrieval_launch.sh, or look yourself and leave retriever.corpus_path "
                "out",
            )
        elif meant.identity is not None and identity != meant.identity:
            yield error(
                f"{url} serves {health.get('corpus_path')} ({_describe(identity)}), "
                f"retriever.corpus_path={meant.path} "
                f"({_describe(meant.identity)}) is meant",
                "the answers to the questions may not be in it",
                f"bash retrieval_launch.sh --corpus_path {meant.path}",
            )
    if meant is not None and meant.problem is not None:
        yield error(
            f"retriever.corpus_path={meant.path} can't be read ({meant.problem})",
            "what the servers serve can't be compared with it",
            "retriever.corpus_path=<corpus.jsonl> as this machine sees it, or null",
        )
    known = {
        json.dumps(identity, sort_keys=True): url for url, identity in said.items() if identity is not None
    }
    if meant is None and len(known) > 1:
        yield warning(
            f"the servers {' and '.join(known.values())} serve different corpora",
            "the same query finds other documents at each of them",
            "start all with one --corpus_path, or take the odd one out of retriever.url",
        )


def _identity(server: Server) -> dict | None:
    """By its /health; None where that does not say it, or somebody else's server says it in its own way."""
    corpus = server.health.get("corpus")
    is_ours = isinstance(corpus, dict) and {"num_bytes", "sample_sha256"} <= corpus.keys()
    return corpus if is_ours else None


def _describe(identity: dict) -> str:
    return f"{identity['num_bytes']:,} bytes, hash {identity['sample_sha256'][:12]}"
