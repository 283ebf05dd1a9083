"""Checks of the network between nodes, and of their clocks."""

from __future__ import annotations

from collections.abc import Iterator

from verl.doctor import needs
from verl.doctor.facts import Facts, Machine
from verl.doctor.findings import Finding, error, warning
from verl.doctor.registry import check_each

CHOOSE = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
CLOCK_SECONDS = 2.0


@check_each("network-card", needs.several_nodes)
def find_cards_to_choose_from(facts: Facts, machine: Machine) -> Iterator[Finding]:
    """several network cards without a chosen one, or a chosen one that is not there"""
    if not facts.has_several_nodes:
        return
    cards = [card for card in machine.cards if not card.is_virtual]
    names = {card.name for card in machine.cards} | {"lo"}
    for variable in CHOOSE:
        chosen = machine.environment.get(variable)
        if chosen and not any(_matches(chosen, name, exact=variable.startswith("GLOO")) for name in names):
            yield error(
                f"{variable}={chosen} names no card that is up ({', '.join(sorted(names))})",
                "the processes would not find each other",
                f"export {variable}={cards[0].name if cards else '<card>'}",
            )
    if len(cards) > 1 and not any(machine.environment.get(variable) for variable in CHOOSE):
        shown = ", ".join(f"{card.name} ({card.addresses[0]})" for card in cards)
        yield warning(
            f"several network cards, and none is chosen: {shown}",
            "weights and gradients go over the card with Ray's address, which need not be the fast one",
            "ray start --node-ip-address=<address of the fast card> on each node, or export "
            f"NCCL_SOCKET_IFNAME={cards[-1].name} GLOO_SOCKET_IFNAME={cards[-1].name}",
        )


def _matches(chosen: str, name: str, exact: bool) -> bool:
    """NCCL takes beginnings of names, "=" before exact ones, "^" before those left out; gloo exact ones."""
    if chosen.startswith("^"):
        return True
    exact = exact or chosen.startswith("=")
    parts = chosen.lstrip("=").split(",")
    return any(name == part.strip() if exact else name.startswith(part.strip()) for part in parts)


@check_each("clock", needs.nodes)
def find_clock_skew(facts: Facts, machine: Machine) -> Iterator[Finding]:
    """a node's clock off by seconds"""
    if abs(machine.clock_offset_s) - machine.clock_error_s > CLOCK_SECONDS:
        way = "ahead of" if machine.clock_offset_s > 0 else "behind"
        yield warning(
            f"its clock is {abs(machine.clock_offset_s):.1f} s {way} the driver's",
            "times in logs and metrics don't fit together, and files look newer than they are",
            "chronyc makestep (or timedatectl set-ntp true) on that node",
        )
