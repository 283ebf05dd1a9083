"""Network cards, names, and who listens on a port; from the kernel, in milliseconds."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from pathlib import Path

from verl.doctor.facts import Card

VIRTUAL = (
    "docker",
    "br-",
    "virbr",
    "veth",
    "cni",
    "flannel",
    "cali",
    "tun",
    "tap",
    "wg",
    "ifb",
    "podman",
    "lxc",
)
_GET_FLAGS, _GET_ADDRESS, _IS_UP = 0x8913, 0x8915, 0x1  # SIOCGIFFLAGS, SIOCGIFADDR, IFF_UP
_LISTEN = "0A"


def look_at_cards() -> tuple[Card, ...]:
    """Cards that are up and have an address that other machines can reach; not the loopback."""
    cards = []
    for _, name in sorted(socket.if_nameindex(), key=lambda card: card[1]):
        addresses = _addresses(name)
        if name != "lo" and addresses and _is_up(name):
            cards.append(Card(name, addresses, name.startswith(VIRTUAL)))
    return tuple(cards)


def _is_up(name: str) -> bool:
    flags = _ask(name, _GET_FLAGS)
    return flags is not None and bool(struct.unpack_from("H", flags, 16)[0] & _IS_UP)


def _ask(name: str, question: int) -> bytes | None:
    """What the kernel answers about a card: its name in 16 bytes, then the answer."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked, contextlib.suppress(OSError):
        return fcntl.ioctl(asked.fileno(), question, struct.pack("256s", name.encode()[:15]))
    return None


def _addresses(name: str) -> tuple[str, ...]:
    answer = _ask(name, _GET_ADDRESS)
    found = [] if answer is None else [socket.inet_ntoa(answer[20:24])]
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, card = line.split()
            address = ipaddress.IPv6Address(bytes.fromhex(digits))
            if card == name and not address.is_link_local:
                found.append(str(address))
    return tuple(found)


def resolve(host: str) -> tuple[str, ...]:
    """The addresses of a name; () for one that is not known."""
    try:
        return tuple(dict.fromkeys(str(info[4][0]) for info in socket.getaddrinfo(host, None)))
    except (OSError, UnicodeError):
        return ()


def is_own(address: str) -> bool:
    """Whether an address is one of this machine's."""
    own = {address for card in look_at_cards() for address in card.addresses}
    return address in own or ipaddress.ip_address(address).is_loopback


def port_holder(port: int) -> str | None:
    """Who listens on a port of this machine: "python3 (pid 77)"; None: nobody, or not to be seen."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == _LISTEN and int(words[1].rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{words[9]}]")
    if not inodes:
        return None
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if any(os.readlink(handle) in inodes for handle in (process / "fd").iterdir()):
                return f"{(process / 'comm').read_text().strip()} (pid {process.name})"
    return "a program of another user"
