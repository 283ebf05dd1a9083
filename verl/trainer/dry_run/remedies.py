"""What to change so that a plan fits: the cheapest change that does it, tried on the plan itself.

The changes (`changes.py`) are in the order of what they cost: first those that cost nothing, then some time
in a step, then much of it, then hardware. Each is tried alone, and then together with those before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from omegaconf import DictConfig

from verl.trainer.dry_run.changes import (
    Change,
    Ladder,
    applied,
    ladders_of,
    more_nodes,
    parallel_ladder,
    passes_as_now,
    servers,
)
from verl.trainer.dry_run.hardware import Hardware
from verl.trainer.dry_run.plan import Models, Plan, build_plan

MOST_NODES = 64
NO_PLAN = 1 << 80  # bytes, more than any plan lacks


def cheapest_change(config: DictConfig, hardware: Hardware, models: Models) -> list[Change] | None:
    """The changes that make the plan fit: one if one does, else the first few that do together, else more
    GPUs. None: nothing of this does.
    """
    search = _Search(config, hardware, models)
    for taken in search.ways():
        if search.fits(taken):
            return [ladder[-1] for ladder in search.needed(taken)]
    return None


class _Search:
    """Tries changes on plans. What is taken is a list of ladders, each up to the change that is made."""

    def __init__(self, config: DictConfig, hardware: Hardware, models: Models):
        self.config, self.hardware, self.models = config, hardware, models
        self.lacks: dict[frozenset[tuple[str, object]], int] = {}
        self.is_megatron = config.actor_rollout_ref.actor.strategy == "megatron"
        kept = passes_as_now(config, self.planned([])) if self.is_megatron else []
        self.kept: list[Ladder] = [(change,) for change in kept]

    def ways(self) -> Iterator[list[Ladder]]:
        """What may do it, cheapest first; each is made from what the ones before it could not."""
        ladders = self.ladders([])
        for ladder in ladders:
            yield from ([ladder[: number + 1]] for number in range(len(ladder)))
        gathered = self.walk(self.kept, ladders)
        yield gathered
        if (change := servers(self.config, self.hardware, self.models)) is not None:
            apart: list[Ladder] = [(change,)]
            yield apart
            with_servers = self.walk([*self.kept, *apart], self.ladders(apart))
            yield with_servers
            if self.lacks_in_rollout(gathered):
                gathered = with_servers
        for change in more_nodes(self.config, MOST_NODES):
            yield [(change,)]
            taken: list[Ladder] = [*gathered, (change,)]
            yield taken
            if self.is_megatron:
                yield self.walk(taken, [parallel_ladder(applied(self.config, [change]), self.models)])

    def ladders(self, taken: list[Ladder]) -> list[Ladder]:
        config = applied(self.config, _last(taken))
        return list(ladders_of(config, self.hardware, self.models, self.planned(taken)))

    def planned(self, taken: list[Ladder]) -> Plan:
        return build_plan(applied(self.config, _last(taken)), self.hardware, self.models)

    def lacks_in_rollout(self, taken: list[Ladder]) -> bool:
        plan = self.planned(taken)
        return bool(plan.problems) or any(load.total("rollout") > load.capacity for load in plan.loads)

    def lack(self, taken: list[Ladder]) -> int:
        """Bytes that are missing, over all devices and phases; 0: the plan fits."""
        settings = {key: value for change in _last(taken) for key, value in change.settings.items()}
        key = frozenset(settings.items())
        if key not in self.lacks:
            try:
                self.lacks[key] = self.planned(taken).lack
            except ValueError:  # sizes that so many processes can't be dealt out to
                self.lacks[key] = NO_PLAN
        return self.lacks[key]

    def fits(self, taken: list[Ladder]) -> bool:
        return self.lack(taken) == 0

    def walk(self, taken: list[Ladder], ladders: Sequence[Ladder]) -> list[Ladder]:
        """`taken`, and of each ladder the mildest change that helps as much as any of it; until it fits."""
        for ladder in ladders:
            if self.fits(taken):
                break
            ways = [taken, *([*taken, ladder[: number + 1]] for number in range(len(ladder)))]
            taken = min(ways, key=self.lack)  # the first of equals
        return taken

    def needed(self, taken: list[Ladder]) -> list[Ladder]:
        """Without those that the others do without, the dearest left out first; milder ones where they do."""
        for ladder in reversed(taken):
            place = next(number for number, one in enumerate(taken) if one is ladder)
            parts: list[list[Ladder]] = [[], *([ladder[:size]] for size in range(1, len(ladder)))]
            after = taken[place + 1 :]
            milder = [taken[:place] + part + after for part in parts]
            taken = next((fewer for fewer in milder if self.fits(fewer)), taken)
        return taken


def _last(taken: list[Ladder]) -> list[Change]:
    return [ladder[-1] for ladder in taken]
