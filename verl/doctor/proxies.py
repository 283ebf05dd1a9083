"""Which requests a proxy of the environment would catch, by the rules of httpx and of requests.

They agree on little. Of NO_PROXY's entries

    10.0.0.7, node7         both understand an exact address or name; subdomains of a name go with it
    .cluster.local          requests: also cluster.local itself; httpx: only names below it
    10.0.0.0/8              requests: the network; httpx: the one address 10.0.0.0
    10.0.0.7:8000           httpx: that port; requests: nothing (a name with a port it does understand)
    *                       httpx: all; requests: all when it is the only entry

Both read the lower-case variable first, and others (Go, parts of curl) only one of the two spellings. So the
advice is always the same: exact host names, in both spellings.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit

VARIABLES = tuple(
    spelling
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
    for spelling in (name, name.upper())
)


def proxy_for(url: str, environment: Mapping[str, str]) -> str | None:
    """The proxy that both libraries would take for a URL, NO_PROXY aside; without user and password."""
    scheme = urlsplit(url).scheme
    for name in (f"{scheme}_proxy", "all_proxy"):
        value = _value(name, environment)
        if value:
            return without_password(value)
    return None


def without_password(url: str) -> str:
    return url.rpartition("@")[2] if "://" not in url else _drop_user(url)


def _drop_user(url: str) -> str:
    split = urlsplit(url)
    return split._replace(netloc=split.netloc.rpartition("@")[2]).geturl()


def _value(name: str, environment: Mapping[str, str]) -> str:
    """As urllib: the lower-case spelling wins, also when it is empty."""
    return environment.get(name, environment.get(name.upper(), ""))


def httpx_goes_around(url: str, no_proxy: str) -> bool:
    """Whether httpx (also ours, with retriever.use_proxy=true) goes to a URL directly."""
    return any(_httpx_entry_matches(url, entry.strip()) for entry in no_proxy.split(","))


def _httpx_entry_matches(url: str, entry: str) -> bool:
    split = urlsplit(url)
    host = (split.hostname or "").lower()
    if not entry:
        return False
    if entry == "*":
        return True
    if "://" in entry:
        scheme, _, entry = entry.partition("://")
        if scheme not in ("all", split.scheme):
            return False
        name, port = _split_port(entry.partition("/")[0])
        return port in (None, _port(url)) and host == name
    if _is_address(entry.partition("/")[0]):
        return host == entry.partition("/")[0].lower()
    name, port = _split_port(entry.partition("/")[0])
    if port not in (None, _port(url)):
        return False
    if name == "localhost":
        return host == name
    if name.startswith("."):
        return host.endswith(name)
    return host == name or host.endswith("." + name)


def requests_goes_around(url: str, no_proxy: str) -> bool:
    """Whether requests goes to a URL directly."""
    split = urlsplit(url)
    host = (split.hostname or "").lower()
    entries = [entry for entry in no_proxy.replace(" ", "").lower().split(",") if entry]
    if entries == ["*"]:
        return True
    names = [host] if _is_ipv4(host) or split.port is None else [host, f"{host}:{split.port}"]
    for entry in entries:
        if _is_ipv4(host) and _in_network(host, entry):
            return True
        entry = entry.lstrip(".")
        if any(name == entry or name.endswith("." + entry) for name in names):
            return True
    return False


def _port(url: str) -> int | None:
    """As httpx: None for the usual one of the scheme."""
    split = urlsplit(url)
    return None if split.port == {"http": 80, "https": 443}.get(split.scheme) else split.port


def _split_port(text: str) -> tuple[str, int | None]:
    name, colon, port = text.lower().rpartition(":")
    return (name, int(port)) if colon and port.isdigit() else (text.lower(), None)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _is_ipv4(text: str) -> bool:
    return _is_address(text) and ":" not in text


def _in_network(host: str, entry: str) -> bool:
    try:
        return "/" in entry and ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False)
    except ValueError:
        return False


def is_inside(host: str, addresses: tuple[str, ...] = ()) -> bool:
    """Whether a host is one of this network (a bare name, this machine, a private address), where a proxy to
    the outside can't lead. addresses: what its name resolves to."""
    if _is_address(host):
        addresses = (host,)
    elif "." not in host:
        return True
    return any(
        ipaddress.ip_address(address).is_private or ipaddress.ip_address(address).is_loopback
        for address in addresses
    )
