"""Rollouts that go on while the policy is trained: groups are begun ahead, within a bound on staleness.

    send_weights -> begun as there is room -> RolloutWorker ... -> take: ready groups, and all that are due
         ^                                                              |
         +------------------- step: log-probs, update <-----------------+

The driver calls this module between the phases of a step and nowhere else. Rollouts need no thread here,
since all that may be sampled during an update is begun before it.

Every group is due in some step from the moment in which it is begun, and each step has `train_batch_size`
groups. A batch takes ready groups, and waits for a group that could not be trained by its step otherwise. So
no group becomes too old, and long trajectories are trained as often as they are sampled: if the late ones
were dropped, the short ones would be left. With `too_old=mask` no batch waits. A group all of whose turns are
too old is asked again.

A group that is not over within `group_deadline` is asked again too; no prompt is lost. With `repeatable`,
weights change only while no group is under way, and batches are cut in the order in which prompts were drawn,
so that the run is the same however fast the processes are.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl.config import Config
from verl.protocol import DataProto, DataProtoFuture, object_array
from verl.records.figures import UNKNOWN_REWARD_REASONS
from verl.sessions.engine_contract import EngineUnavailable
from verl.single_controller.base import WorkerGroup
from verl.trainer.ppo.collection import TrajectoryCollector
from verl.trainer.ppo.saved_rows import continuations, load_rows, save_rows
from verl.workers.rollout_worker import MEMBER

STREAM_FILE = "rollout_stream.npz"
OLD_STREAM_FILE = "rollout_stream.pkl"  # of older versions; it is not read, as a pickle can run programs
POLL_SECONDS = 0.1
LEAN_FADES = 0.95  # weight of a step relative to the next one: about the last 20 steps count
MOST_SILENT = 3  # deadlines in a row, without any finished row, at which a process is given up
SHIPPED = ("raw_prompt_ids", "uid", "continuation", "episode", MEMBER)


@dataclass(eq=False)
class PromptGroup:
    """All rows of one prompt."""

    number: int  # its position in the order in which prompts are drawn
    attempt: int  # how often the prompt was asked before
    prompts: DataProto  # its rows, ready to be generated from
    rows: dict[int, DataProto] = field(default_factory=dict)  # member -> its trajectory, once that ended
    due: int = -1  # the update after which it is trained at the latest; -1 while it has not been begun
    rank: int = 0  # rank of the process that samples it
    begun: float = 0.0  # time.monotonic() at which it was begun

    @property
    def uid(self) -> str:
        return str(self.prompts.non_tensor_batch["uid"][0])

    @property
    def version_first(self) -> int | None:
        """Return the version of its oldest sampled token, or None if it has no token."""
        records = [row.non_tensor_batch["trajectory"][0] for row in self.rows.values()]
        return min(
            (record["version_first"] for record in records if record["version_first"] is not None),
            default=None,
        )

    @property
    def version_newest(self) -> int:
        """Return the version of the first token of its newest turn, or -1 if it has no turn with a token."""
        versions = (turn.get("version_first") for turn in self.turns())
        return max((version for version in versions if version is not None), default=-1)

    def turns(self) -> Iterator[dict[str, Any]]:
        """Yield the records of all turns of its rows."""
        for row in self.rows.values():
            yield from row.non_tensor_batch["trajectory"][0]["turns"]

    def num_sampled(self, oldest: int | None = None) -> int:
        """Count the tokens that the policy sampled.

        With `oldest`, turns that older weights began are left out.
        """
        return sum(turn["end"] - turn["start"] for turn in self.turns() if not is_stale(turn, oldest))

    def trajectories(self, oldest: int | None) -> DataProto:
        """Return its rows in order, with their prompts' columns.

        Unless `oldest` is None, they have `stale_mask` [N, R] bool too: the tokens of turns that older
        weights began, which are scored and not trained.
        """
        rows = DataProto.concat([self.rows[member] for member in sorted(self.rows)])
        if oldest is not None:
            stale = torch.zeros_like(rows.tensors["response_mask"], dtype=torch.bool)
            for row, record in enumerate(rows.non_tensor_batch["trajectory"]):
                for turn in record["turns"]:
                    if is_stale(turn, oldest):
                        stale[row, turn["start"] : turn["end"]] = True
            rows.tensors["stale_mask"] = stale
        columns = {name: x for name, x in self.prompts.non_tensor_batch.items() if name != "continuation"}
        return DataProto(rows.batch, columns | {"trajectory": rows.non_tensor_batch["trajectory"]})


def is_stale(turn: dict[str, Any], oldest: int | None) -> bool:
    """Return whether weights older than `oldest` began a turn; with None, no turn is stale."""
    version = turn.get("version_first")
    return oldest is not None and version is not None and version < oldest


def weight_folder(config: Config) -> Path | None:
    """Return the folder for the rollouts' weights, which no other run uses; None if they are in no files."""
    rollout = config.actor_rollout_ref.rollout
    run = Path(config.trainer.default_local_dir).absolute()
    if rollout.weight_transfer in ("ray", "collective"):
        return None
    if rollout.weight_dir is None:
        return run / "rollout_weights"
    name = f"{run.name}-{zlib.crc32(str(run).encode()):08x}"
    return Path(rollout.weight_dir).expanduser().absolute() / name


def single_rows(batch: DataProto | None) -> Iterator[tuple[str, int, DataProto]]:
    """Yield the group's uid, the row's number in the group, and the row, for each row that a process gave."""
    if batch is None:
        return
    for index in range(len(batch)):
        row = batch.select_idxs(np.array([index]))
        yield row.non_tensor_batch["uid"][0], int(row.non_tensor_batch[MEMBER][0]), row


def has_failed(row: DataProto) -> bool:
    """Return whether a trajectory ended for a reason that is not the policy's."""
    return row.non_tensor_batch["trajectory"][0]["finish_reason"] in UNKNOWN_REWARD_REASONS


@dataclass(frozen=True)
class StalenessGate:
    """The bound on how far rollouts may be ahead of training.

    It is pure counting, without a clock, a process or a tensor. A version is the number of updates that a
    policy has behind it. A group that is trained in the step after update v has staleness v minus the version
    of its oldest sampled token: the time that it waited in the queue counts. AReaL's rule (Fu et al. 2025,
    arXiv:2505.24298, section 5.1) bounds staleness before it arises: no more groups are begun than
    `max_staleness` + 1 steps can take. The rule alone does not bound the age of a slow group that others
    overtake; `due` and `leaves_time` do.

    Attributes:
        max_staleness: the bound, in updates.
        groups_per_step: groups that each step trains.
        num_steps: steps of the whole run; what no step would train is not begun.
    """

    max_staleness: int
    groups_per_step: int
    num_steps: int

    def room(self, version: int, present: int) -> int:
        """Return how many groups may be begun after update `version`.

        Args:
            version: number of updates so far.
            present: groups that were begun and that no finished step has trained.
        """
        steps = min(self.max_staleness + 1, self.num_steps - version)
        return max(0, steps * self.groups_per_step - present)

    def oldest(self, version: int) -> int:
        """Return the oldest version whose turns may be trained in the step after update `version`."""
        return version - self.max_staleness

    def due(self, version: int, present: int) -> int:
        """Return the update after which the next group is trained at the latest.

        Steps take groups in the order in which they are begun. As there was `room`, the update is within
        `max_staleness`.
        """
        return version + max(0, present) // self.groups_per_step

    def leaves_time(self, version: int, dues: Iterable[int]) -> bool:
        """Return whether the groups that are left can all be trained in time.

        They are trained by the steps after the one that follows update `version`.

        Args:
            version: number of updates so far.
            dues: the update after which each of these groups is due.
        """
        first = version + 1
        return all(due >= first + number // self.groups_per_step for number, due in enumerate(sorted(dues)))


@dataclass
class Lean:
    """A measure of how much shorter trained rows are than all rows that ended.

    Past steps fade, but count for a while, since a single step says little.
    """

    trained_tokens: float = 0  # without the masked ones
    trained_rows: float = 0
    ended_tokens: float = 0
    ended_rows: float = 0

    def add_trained(self, group: PromptGroup, oldest: int | None) -> None:
        """Count a group of a batch; `oldest` is that of `PromptGroup.trajectories`."""
        self.trained_tokens += group.num_sampled(oldest)
        self.trained_rows += len(group.rows)
        self.add_ended(group)

    def add_ended(self, group: PromptGroup) -> None:
        """Count a group that is trained or dropped."""
        self.ended_tokens += group.num_sampled()
        self.ended_rows += len(group.rows)

    def ratio(self) -> float:
        """Return how long trained rows are, relative to all rows that ended.

        This is the mean of trained tokens over trained rows, divided by the mean of sampled tokens over rows
        that ended. It is 1 where length decides nothing.
        """
        if not self.trained_rows or not self.ended_tokens:
            return 1.0
        return (self.trained_tokens / self.ended_tokens) * (self.ended_rows / self.trained_rows)

    def fade(self) -> None:
        """Let everything so far count less than the next step."""
        self.trained_tokens *= LEAN_FADES
        self.trained_rows *= LEAN_FADES
        self.ended_tokens *= LEAN_FADES
        self.ended_rows *= LEAN_FADES


class RolloutStream:
    """The groups that are sampled ahead, from the moment in which they are drawn until they are trained.

        drawn, or `again` --_begin--> `running` --_receive: all rows ended--> `ready` --take--> `taken`
                                          |                                      |                 |
                                     past its deadline                        too old        send_weights:
                                          +--> `again`                           +--> `again`     trained

    Args:
        config: the whole configuration.
        collector: draws the prompts.
        workers: a group of `RolloutWorker`.
        num_steps: steps of the whole run.
        say: takes one line for the user.
    """

    def __init__(
        self,
        config: Config,
        collector: TrajectoryCollector,
        workers: WorkerGroup,
        num_steps: int,
        say: Callable[[str], None],
    ) -> None:
        self.collector = collector
        self.workers = workers
        self.say = say
        self.settings = config.trainer.async_training
        self.gate = StalenessGate(self.settings.max_staleness, config.data.train_batch_size, num_steps)
        self.masks = self.settings.too_old == "mask"
        self.version = 0  # number of updates that the present weights have behind them
        self.next_number = 0  # number of the next group that is drawn
        self.replaced = 0  # groups of the present step that teach nothing, for which others are taken
        self.running: dict[str, PromptGroup] = {}  # uid -> group
        self.ready: list[PromptGroup] = []
        self.again: list[PromptGroup] = []  # to be asked again, before new ones
        self.taken: list[PromptGroup] = []  # in batches of the present step
        self._lean = Lean()
        self._sums = dict.fromkeys(("dropped", "expired", "trainer_idle_seconds"), 0.0)
        # How many times in a row groups of each process were given up.
        self._silent = [0] * workers.world_size
        # Calls with weights and rows that a busy process may not have taken yet.
        self._sent: list[DataProtoFuture] = []

    def send_weights(self, version: int, weights: DataProtoFuture, begin: bool = True) -> None:
        """Send the policy after `version` steps to the processes.

        With `begin`, the groups for which there is room now are begun. The step before, if there was one, is
        over.
        """
        while self.settings.repeatable and self.running:
            self._receive()
        self._sent.append(self.workers.load_weights(weights, version))
        self.version = version
        self.taken = []
        self.replaced = 0
        if begin:
            self._begin()

    def settle(self) -> None:
        """Wait until the processes have taken all that was sent to them; raise what they raised on it."""
        sent = self._sent
        self._sent = []
        for call in sent:
            call.get()

    def take(self, count: int) -> DataProto:
        """Return the trajectories of `count` groups, as soon as `_batch` has them."""
        started = time.perf_counter()
        if self.taken:  # the step needs more than its share, as some teach nothing
            self.replaced += count
        oldest = self.gate.oldest(self.version)
        while True:
            self._drop_old(oldest)
            if not self.settings.repeatable or len(self.ready) + len(self.running) < count:
                self._begin()
            chosen = self._batch(count)
            if chosen:
                break
            self._receive()
        self._sums["trainer_idle_seconds"] += time.perf_counter() - started
        self.taken += chosen
        self.ready = [group for group in self.ready if group not in chosen]
        trained_from = oldest if self.masks else None
        for group in chosen:
            self._lean.add_trained(group, trained_from)
        return DataProto.concat([group.trajectories(trained_from) for group in chosen])

    def _batch(self, count: int) -> list[PromptGroup]:
        """Return the `count` groups to be trained now, or an empty list if the batch has to wait.

        It waits while there are not so many groups, or while groups that are still running could not be
        trained in time if the batch went without them.
        """
        live = [*self.ready, *self.running.values()]
        if self.settings.repeatable or self.masks:
            live.sort(key=lambda group: group.number)
        else:
            live.sort(key=lambda group: (group.due, group.number))
        chosen = [group for group in live if group.uid not in self.running][:count]
        if len(chosen) < count:
            return []
        if chosen == live[:count]:  # there is none to wait for
            return chosen
        if self.settings.repeatable:
            return []
        dues = [group.due for group in live if group not in chosen]
        if self.masks or self.gate.leaves_time(self.version, dues):
            return chosen
        return []

    def metrics(self) -> dict[str, float]:
        """Return `async/*` and the engines' `rollout/*` since the last call."""
        figures = self.workers.figures()
        self.settle()
        names = dict.fromkeys(name for rank_figures in figures for name in rank_figures)
        metrics = {
            name: float(np.mean([rank_figures[name] for rank_figures in figures if name in rank_figures]))
            for name in names
        }
        metrics |= {f"async/{name}": value for name, value in self._sums.items()}
        metrics["async/queue_groups"] = len(self.ready)
        metrics["async/running_groups"] = len(self.running)
        metrics["async/lean"] = self._lean.ratio()
        self._sums = dict.fromkeys(self._sums, 0.0)
        self._lean.fade()
        return metrics

    def room(self) -> int:
        """Return how many groups may be begun now."""
        return self.gate.room(self.version, self._present())

    def _present(self) -> int:
        """Count the groups that have begun and that no finished step has trained."""
        return len(self.running) + len(self.ready) + len(self.taken) - self.replaced

    def _begin(self) -> None:
        """Begin the groups for which there is room: those to be asked again first, then new ones."""
        room = self.room()
        groups = self.again[:room]
        self.again = self.again[room:]
        if num_fresh := room - len(groups):
            present = [*self.running.values(), *self.ready, *groups, *self.taken]
            rows_under_way = sorted({int(group.prompts.non_tensor_batch["index"][0]) for group in present})
            drawn = self.collector.drawn_ahead(self.next_number, num_fresh, rows_under_way)
            groups += [PromptGroup(self.next_number + i, 0, prompts) for i, prompts in enumerate(drawn)]
            self.next_number += num_fresh
        for group in groups:
            if group.due < 0:
                group.due = self.gate.due(self.version, self._present())
            self.running[group.uid] = group
            self._submit(group)

    def _submit(self, group: PromptGroup) -> None:
        # Processes that are silent come last.
        load = [silent * (1 + len(self.running)) for silent in self._silent]
        for other in self.running.values():
            load[other.rank] += 1
        group.rank = int(np.argmin(load))
        group.begun = time.monotonic()
        columns = group.prompts.non_tensor_batch
        members = [number for number in range(len(group.prompts)) if number not in group.rows]
        rows = group.prompts.select(non_tensor_batch_keys=[name for name in SHIPPED if name in columns])
        rows.non_tensor_batch[MEMBER] = object_array(list(range(len(group.prompts))))
        entries: list[DataProto | None] = [None] * self.workers.world_size
        entries[group.rank] = rows.select_idxs(np.array(members))
        self._sent.append(self.workers.submit(entries))

    def _receive(self) -> None:
        """Take the rows that have ended, and give up the groups that take too long."""
        polled = self.workers.poll(POLL_SECONDS)
        self.settle()
        for rank, rows in enumerate(polled):
            self._silent[rank] = 0 if rows is not None else self._silent[rank]
            for uid, member, row in single_rows(rows):
                group = self.running.get(uid)
                if group is not None:  # otherwise it was given up
                    group.rows[member] = row
                    if len(group.rows) == len(group.prompts):
                        self.ready.append(self.running.pop(uid))
        deadline = self.settings.group_deadline
        key = "trainer.async_training.group_deadline"
        late_before = time.monotonic() - deadline
        late = [group for group in self.running.values() if group.begun < late_before]
        if late:
            place_and_remedy = f"in rollout process {late[0].rank}; they are asked again"
            self.say(f"{len(late)} groups were not over within {deadline:g} s ({key}) {place_and_remedy}")
            self.workers.cancel({group.uid for group in late})
            for group in late:
                del self.running[group.uid]
                self.again.append(self._anew(group))
            self._sums["expired"] += len(late)
            for rank in {group.rank for group in late}:
                self._silent[rank] += 1
                if self._silent[rank] == MOST_SILENT:
                    silence = f"rollout process {rank} has finished nothing for {MOST_SILENT} times"
                    raise EngineUnavailable(f"{silence} {key}={deadline:g} s")

    def _drop_old(self, oldest: int) -> None:
        for group in list(self.ready):
            version = group.version_newest if self.masks else group.version_first
            if version is not None and version < oldest:
                self.ready.remove(group)
                self.again.append(self._anew(group))
                self._lean.add_ended(group)
                self._sums["dropped"] += 1

    def _anew(self, group: PromptGroup) -> PromptGroup:
        """Return the group to be asked again from its prompt on, with other seeds."""
        number = group.number
        attempt = group.attempt + 1
        return PromptGroup(number, attempt, self.collector.asked_again(group.prompts, number, attempt))

    def save(self, folder: Path, step_is_over: bool) -> None:
        """Write all groups that no finished step has trained.

        Args:
            folder: folder of the checkpoint.
            step_is_over: whether the present step is finished. If it is not, its groups are asked again, and
                with them all groups that failed: what made them fail has stopped the run.
        """
        # With `repeatable`, what is under way began with these weights, and will begin with them again.
        repeatable = self.settings.repeatable
        batches = [] if repeatable else self.workers.continuations()
        rows = {(uid, member): row for batch in batches for uid, member, row in single_rows(batch)}
        running: list[tuple[Any, ...]] = []  # arguments of `PromptGroup`, as elsewhere in the state
        for group in self.running.values():
            states: list[Any] = [None] * len(group.prompts)
            for member in range(len(group.prompts)):
                row = group.rows.get(member, rows.get((group.uid, member)))
                if row is not None and not repeatable and not has_failed(row):
                    states[member] = continuations(row)[0]
            prompts = group.prompts.select()
            prompts.non_tensor_batch["continuation"] = object_array(states)
            running.append((group.number, group.attempt, prompts, {}, group.due))
        again = self.again
        ready = self.ready
        if not step_is_over:
            failed = [group for group in ready if any(map(has_failed, group.rows.values()))]
            again = [*again, *(self._anew(group) for group in (*self.taken, *failed))]
            ready = [group for group in ready if group not in failed]
        state = {
            "running": running,
            "ready": [(group.number, group.attempt, group.prompts, group.rows, group.due) for group in ready],
            "again": [(group.number, group.attempt, group.prompts, {}, group.due) for group in again],
            "next_number": self.next_number,
            "lean": asdict(self._lean),
        }
        save_rows(folder / STREAM_FILE, state)

    def load(self, folder: Path, step: int) -> None:
        """Read what `save` wrote.

        There is nothing to read if the run has not sampled ahead so far. Raises ValueError if the file is
        damaged.
        """
        self.version = step
        file = folder / STREAM_FILE
        if not file.is_file():
            if (folder / OLD_STREAM_FILE).is_file():
                steps = step + self.settings.max_staleness + 1
                self.next_number = steps * self.gate.groups_per_step  # above the numbers of that version
                self.say(f"{folder / OLD_STREAM_FILE} is of an older version; its rows are left out")
            return
        state = load_rows(file)
        self.next_number = state["next_number"]
        self._lean = Lean(**state.get("lean", {}))  # older versions wrote none
        self.again = [PromptGroup(*arguments) for arguments in (*state["running"], *state["again"])]
        self.ready = [PromptGroup(*arguments) for arguments in state["ready"]]
