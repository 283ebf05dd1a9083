"""Addresses on which servers listen."""

from __future__ import annotations

import ipaddress
import socket


def is_loopback(address: str) -> bool:
    """Return whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def open_note(host: str, use: str) -> str | None:
    """Return the line of a server without a key that others can reach, or None if they can't.

    Args:
        host: The address on which the server listens.
        use: What others can do, as "can search".
    """
    if is_loopback(host):
        return None
    return (
        f"note: the server listens on {host} without a key: whoever reaches this machine {use}. "
        "--host 127.0.0.1 keeps it to this machine"
    )


def open_socket(host: str, port: int) -> socket.socket:
    """Return a bound socket, so that a taken port is one clear error.

    Raises ValueError if the port or the host can't be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # If the protocol is named, asyncio switches Nagle's algorithm off. Otherwise a reply can wait 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise ValueError(f"can't listen on {host}:{port} ({error}): try another --host or --port") from None
    return listener
