"""Rollouts that go on while the policy is trained: groups begun ahead, as far as `StalenessGate` lets them.

    send_weights -> begun as there is room -> RolloutWorker ... -> take: the oldest groups that are ready
         ^                                                              |
         +------------------- step: log-probs, update <-----------------+

The driver calls it between the phases of a step and nowhere else: rollouts need no thread here, since all
that may be sampled during an update is begun before it. A group that is too old when a batch is cut (with
`too_old=mask` one all of whose turns are), or that is not over within `group_deadline`, is asked again; no
prompt is lost. With `repeatable` weights change only
where no group is under way, and batches are cut in the order in which prompts were drawn, so that the run is
the same however fast the processes are.
"""

from __future__ import annotations

import pickle
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl.config import Config
from verl.protocol import DataProto, DataProtoFuture, object_array
from verl.single_controller.base import WorkerGroup
from verl.trainer.ppo.collection import TrajectoryCollector, continuations
from verl.trainer.ppo.staleness import StalenessGate
from verl.workers.rollout.base import EngineUnavailable
from verl.workers.rollout_worker import MEMBER

STREAM_FILE = "rollout_stream.pkl"
POLL_SECONDS = 0.1
MOST_SILENT = 3  # deadlines that a process may let pass without a row
SHIPPED = ("raw_prompt_ids", "uid", "continuation", "episode", MEMBER)


@dataclass(eq=False)
class PromptGroup:
    """All rows of one prompt.

    number: in the order in which prompts are drawn. attempt: how often it was asked before. prompts: its
    rows, ready to be generated from. rank: of the process that samples it. begun: time.monotonic() of that.
    rows: member -> its trajectory, as they end.
    """

    number: int
    attempt: int
    prompts: DataProto
    rank: int = 0
    begun: float = 0.0
    rows: dict[int, DataProto] = field(default_factory=dict)

    @property
    def uid(self) -> str:
        return str(self.prompts.non_tensor_batch["uid"][0])

    @property
    def version_first(self) -> int | None:
        """Of its oldest sampled token; None: it has none."""
        records = [row.non_tensor_batch["trajectory"][0] for row in self.rows.values()]
        return min((r["version_first"] for r in records if r["version_first"] is not None), default=None)

    @property
    def version_newest(self) -> int:
        """Of the first token of its newest turn; -1: it has none."""
        records = [row.non_tensor_batch["trajectory"][0] for row in self.rows.values()]
        versions = (turn.get("version_first") for record in records for turn in record["turns"])
        return max((version for version in versions if version is not None), default=-1)

    @property
    def has_failed(self) -> bool:
        return any(map(has_failed, self.rows.values()))

    def trajectories(self, oldest: int | None) -> DataProto:
        """Its rows in order, with their prompts' columns; unless `oldest` is None, `stale_mask` [N, R] bool:
        tokens of turns that older weights have begun, which are scored and not trained.
        """
        rows = DataProto.concat([self.rows[member] for member in sorted(self.rows)])
        if oldest is not None:
            stale = torch.zeros_like(rows.tensors["response_mask"], dtype=torch.bool)
            for row, record in enumerate(rows.non_tensor_batch["trajectory"]):
                for turn in record["turns"]:
                    if (version := turn.get("version_first")) is not None and version < oldest:
                        stale[row, turn["start"] : turn["end"]] = True
            rows.tensors["stale_mask"] = stale
        columns = {name: x for name, x in self.prompts.non_tensor_batch.items() if name != "continuation"}
        return DataProto(rows.batch, columns | {"trajectory": rows.non_tensor_batch["trajectory"]})


def weight_folder(config: Config) -> Path | None:
    """Where the weights for the rollouts are written to, by no other run; None: they come over Ray."""
    rollout, run = config.actor_rollout_ref.rollout, Path(config.trainer.default_local_dir).absolute()
    if rollout.weight_transfer == "ray":
        return None
    if rollout.weight_dir is None:
        return run / "rollout_weights"
    name = f"{run.name}-{zlib.crc32(str(run).encode()):08x}"
    return Path(rollout.weight_dir).expanduser().absolute() / name


def single_rows(batch: DataProto | None) -> Iterator[tuple[str, int, DataProto]]:
    """Group, place in it, and row, of each row that a process gave."""
    if batch is None:
        return
    for index in range(len(batch)):
        row = batch.select_idxs(np.array([index]))
        yield row.non_tensor_batch["uid"][0], int(row.non_tensor_batch[MEMBER][0]), row


def has_failed(row: DataProto) -> bool:
    """Whether a trajectory ended for another reason than the policy's."""
    reason = row.non_tensor_batch["trajectory"][0]["finish_reason"]
    return reason in ("search_failed", "env_failed", "unverified")


class RolloutStream:
    """The groups that are sampled ahead, and the processes that sample them.

    Args:
        workers: a group of `RolloutWorker`. say: takes one line for the user.
    """

    def __init__(
        self,
        config: Config,
        collector: TrajectoryCollector,
        workers: WorkerGroup,
        num_steps: int,
        say: Callable[[str], None],
    ) -> None:
        self.config, self.collector, self.workers, self.say = config, collector, workers, say
        self.settings = config.trainer.async_training
        self.gate = StalenessGate(self.settings.max_staleness, config.data.train_batch_size, num_steps)
        self.running: dict[str, PromptGroup] = {}  # by uid
        self.ready: list[PromptGroup] = []
        self.again: list[PromptGroup] = []  # to be asked before others
        self.taken: list[PromptGroup] = []  # of the present step
        self.next_number = 0
        self._counts = dict.fromkeys(("dropped", "expired"), 0)
        self._seconds = dict.fromkeys(("trainer_idle_seconds", "sync_seconds"), 0.0)
        self._silent = [0] * workers.world_size  # times in a row that groups of a process were given up

    # ------------------------------------------------------------------------------------------- of a step

    def send_weights(self, version: int, weights: DataProtoFuture, begin: bool = True) -> None:
        """The policy after `version` steps goes to the processes, and with `begin` what there is room for now
        is begun. The step before, if there was one, is over.
        """
        started = time.perf_counter()
        while self.settings.repeatable and any(group.begun for group in self.running.values()):
            self._receive()
        self.workers.load_weights(weights, version)
        self._seconds["sync_seconds"] += time.perf_counter() - started
        self.gate.version, self.taken = version, []
        if begin:
            for group in self.running.values():
                if not group.begun:  # of a checkpoint
                    self._submit(group)
            self._begin()

    def take(self, count: int) -> DataProto:
        """The trajectories of `count` groups, as soon as there are so many."""
        started = time.perf_counter()
        if self.taken:  # the step needs more than its share, as some teach nothing
            self.gate.drop_ready(count)
        in_order = self.settings.repeatable
        while True:
            self._drop_old()
            if not in_order or len(self.ready) + len(self.running) < count:
                self._begin()
            live = [*self.ready, *(self.running.values() if in_order else ())]
            chosen = sorted(live, key=lambda group: group.number)[:count]
            if len(chosen) == count and all(group.uid not in self.running for group in chosen):
                break
            self._receive()
        self._seconds["trainer_idle_seconds"] += time.perf_counter() - started
        self.taken += chosen
        self.ready = [group for group in self.ready if group not in chosen]
        masks = self.settings.too_old == "mask"
        oldest = self.gate.version - self.settings.max_staleness if masks else None
        return DataProto.concat([group.trajectories(oldest) for group in chosen])

    def metrics(self) -> dict[str, float]:
        """`async/*` and the engines' `rollout/*` since the last call."""
        figures = self.workers.figures()
        names = dict.fromkeys(name for each in figures for name in each)
        metrics = {name: float(np.mean([each[name] for each in figures if name in each])) for name in names}
        metrics |= {f"async/{name}": float(value) for name, value in (self._counts | self._seconds).items()}
        metrics["async/queue_groups"], metrics["async/running_groups"] = len(self.ready), len(self.running)
        self._counts, self._seconds = dict.fromkeys(self._counts, 0), dict.fromkeys(self._seconds, 0.0)
        return metrics

    # --------------------------------------------------------------------------------------------- groups

    def _begin(self) -> None:
        """Begins what there is room for."""
        room = self.gate.room()
        groups, self.again = self.again[:room], self.again[room:]
        if fresh := room - len(groups):
            present = [*self.running.values(), *self.ready, *groups, *self.taken]
            asked = sorted({int(group.prompts.non_tensor_batch["index"][0]) for group in present})
            drawn = self.collector.drawn_ahead(self.next_number, fresh, asked)
            groups += [PromptGroup(self.next_number + i, 0, prompts) for i, prompts in enumerate(drawn)]
            self.next_number += fresh
        self.gate.admit(room)
        for group in groups:
            self.running[group.uid] = group
            self._submit(group)

    def _submit(self, group: PromptGroup) -> None:
        load = [silent * (1 + len(self.running)) for silent in self._silent]  # those that are silent last
        for other in self.running.values():
            load[other.rank] += other.begun > 0
        group.rank, group.begun = int(np.argmin(load)), time.monotonic()
        columns = group.prompts.non_tensor_batch
        members = [number for number in range(len(group.prompts)) if number not in group.rows]
        rows = group.prompts.select(non_tensor_batch_keys=[name for name in SHIPPED if name in columns])
        rows.non_tensor_batch[MEMBER] = object_array(list(range(len(group.prompts))))
        entries: list[DataProto | None] = [None] * self.workers.world_size
        entries[group.rank] = rows.select_idxs(np.array(members))
        self.workers.submit(entries)

    def _receive(self) -> None:
        """Takes what has ended, and gives up what takes too long."""
        for rank, rows in enumerate(self.workers.poll(POLL_SECONDS)):
            self._silent[rank] = 0 if rows is not None else self._silent[rank]
            for uid, member, row in single_rows(rows):
                group = self.running.get(uid)
                if group is not None:  # else it was given up
                    group.rows[member] = row
                    if len(group.rows) == len(group.prompts):
                        self.ready.append(self.running.pop(group.uid))
                        self.gate.finish()
        due = time.monotonic() - self.settings.group_deadline
        late = [group for group in self.running.values() if group.begun < due]
        if late:
            self.say(
                f"{len(late)} groups were not over within {self.settings.group_deadline:g} s "
                f"(trainer.async_training.group_deadline) in rollout process {late[0].rank}; they are asked "
                "again"
            )
            self.workers.cancel({group.uid for group in late})
            for group in late:
                del self.running[group.uid]
                self.gate.drop_running()
                self.again.append(self._anew(group))
            self._counts["expired"] += len(late)
            for rank in {group.rank for group in late}:
                self._silent[rank] += 1
                if self._silent[rank] == MOST_SILENT:
                    raise EngineUnavailable(
                        f"rollout process {rank} has finished nothing for {MOST_SILENT} times "
                        f"trainer.async_training.group_deadline={self.settings.group_deadline:g} s"
                    )

    def _drop_old(self) -> None:
        masks = self.settings.too_old == "mask"
        old = [
            group
            for group in self.ready
            if (version := group.version_first) is not None
            and self.gate.is_too_old(group.version_newest if masks else version)
        ]
        for group in old:
            self.ready.remove(group)
            self.gate.drop_ready()
            self.again.append(self._anew(group))
        self._counts["dropped"] += len(old)

    def _anew(self, group: PromptGroup) -> PromptGroup:
        """The group from its prompt on, with other seeds."""
        attempt = group.attempt + 1
        return PromptGroup(
            group.number, attempt, self.collector.asked_again(group.prompts, group.number, attempt)
        )

    # ---------------------------------------------------------------------------------------- checkpoints

    def save(self, folder: Path, step_is_over: bool) -> None:
        """Writes all groups that no finished step has trained. step_is_over: else those of the present step
        are asked again, and with them all that failed: what made them fail has stopped the run.
        """
        rows: dict[tuple[str, int], DataProto] = {}
        if not self.settings.repeatable:  # there those under way began with these weights, and begin again
            for part in self.workers.continuations():
                rows |= {(uid, member): row for uid, member, row in single_rows(part)}
        running = []
        for group in self.running.values():
            states: list[Any] = [None] * len(group.prompts)
            for member in range(len(group.prompts)):
                row = group.rows.get(member, rows.get((group.uid, member)))
                if row is not None and not self.settings.repeatable and not has_failed(row):
                    states[member] = continuations(row)[0]
            prompts = group.prompts.select()
            prompts.non_tensor_batch["continuation"] = object_array(states)
            running.append((group.number, group.attempt, prompts))
        again, ready = self.again, self.ready
        if not step_is_over:
            failed = [group for group in ready if group.has_failed]
            again = [*again, *(self._anew(group) for group in (*self.taken, *failed))]
            ready = [group for group in ready if group not in failed]
        state = {
            "running": running,
            "ready": [(g.number, g.attempt, g.prompts, g.rows) for g in ready],
            "again": [(g.number, g.attempt, g.prompts) for g in again],
            "next_number": self.next_number,
        }
        with (folder / STREAM_FILE).open("wb") as file:
            pickle.dump(state, file)

    def load(self, folder: Path, step: int) -> None:
        """Takes what `save` wrote; a run that sampled no step ahead so far has nothing there."""
        self.gate.version, self.gate.accepted = step, step * self.gate.groups_per_step
        file = folder / STREAM_FILE
        if not file.is_file():
            return
        state = pickle.loads(file.read_bytes())
        self.next_number = state["next_number"]
        self.again = [PromptGroup(*each) for each in state["again"]]
        self.ready = [
            PromptGroup(number, attempt, prompts, rows=rows)
            for number, attempt, prompts, rows in state["ready"]
        ]
        self.running = {group.uid: group for group in (PromptGroup(*each) for each in state["running"])}
        self.gate.accepted, self.gate.running = self.gate.accepted + len(self.ready), len(self.running)
