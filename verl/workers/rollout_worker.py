"""A process that samples while others train, on an engine of any kind (verl/sessions/engine_contract.py).

    submit(rows of groups) -> thread: TrajectoryService over an engine of its own -> poll: finished rows
    load_weights(version) -> a thread reads files or broadcasts --between two engine steps-->

Calls come in on one thread and leave orders. The loop runs in another thread and takes the orders between two
engine steps. Orders pass through the thread that reads weights, so an order that follows new weights waits
for them. Trajectories that are already running continue until the weights are there.

The engine takes no part in this: it gets weights between two of its steps and goes on with the turns under
way.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from statistics import mean
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from verl.agent.agent import EnvironmentAgent
from verl.agent.engine_load import EngineLoad
from verl.agent.service import TrajectoryService
from verl.agent.trajectory import Trajectory
from verl.config.policy import ActorRolloutRef
from verl.config.schema import AsyncTraining
from verl.environments.calls import complete_future
from verl.protocol import DataProto
from verl.sessions.engine_contract import EngineUnavailable
from verl.single_controller.base import Dispatch, Worker, register
from verl.workers.fsdp_workers import device_kind
from verl.workers.rollout.build import EngineRequest, build_rollout_engine, devices_per_engine
from verl.workers.rollout.collective import CollectiveReader, MeetingPoint

JOIN_SECONDS = 10.0
MEMBER = "member"  # column: the row's number in its group
Job = Callable[[], None]
SubmittedRow = tuple[Trajectory, dict[str, Any]]  # with the columns that it came with


class RolloutFailed(EngineUnavailable):
    """The error of a rollout process whose loop failed or makes no progress.

    If the loop failed, the message has its traceback.
    """


class RolloutWorker(Worker):
    """One rank of the processes that sample.

    Args:
        config: the `actor_rollout_ref` block.
        agent_factory: maps (tokenizer, engine) to an `EnvironmentAgent`.
        settings: the `trainer.async_training` block.
        device: "auto" (CUDA if it is available), "cpu" or "cuda".
    """

    def __init__(
        self,
        config: ActorRolloutRef,
        agent_factory: Callable[[Any, Any], EnvironmentAgent],
        settings: AsyncTraining,
        device: str = "auto",
    ) -> None:
        super().__init__()
        self.config = config
        self.agent_factory = agent_factory
        self.settings = settings
        # The servers of a remote engine have the GPUs.
        self.device = self.get_device("cpu" if config.rollout.name == "remote" else device_kind(device))
        self._orders: SimpleQueue[Job] = SimpleQueue()  # jobs that the loop is to run
        self._bell: Future[None] = Future()  # is set when there is an order
        self._over = threading.Condition()  # guards `_ended` and `_failure`
        # The columns of the rows that were submitted and have not ended. The loop's thread alone uses it.
        self._columns: dict[int, dict[str, Any]] = {}
        self._ended: list[SubmittedRow] = []  # rows that have ended, for `poll`
        self._asked: dict[Future[list[Trajectory]], list[Trajectory]] = {}  # those of `generate_sequences`
        self._rows = count()
        self._failure = ""
        self._closing = False
        self._idle_seconds = 0.0
        self._figured: list[Trajectory] = []  # trajectories that ended since the last call of `figures`
        self._sync_delays: list[float] = []  # seconds, of the weights that came since that call
        # bytes of all weights that came over Ray; bytes that `figures` has reported so far
        self._sync_bytes = self._noted_bytes = 0
        self._reader: Any = None  # the reader of weights that come by a group or in files
        self._passing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights")
        self._thread: threading.Thread | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_rollout(self, num_rows: int, dtype: str) -> None:
        """Create the engine and the agent for `num_rows` trajectories at once.

        Raises ValueError if the engine can't run the model, or can't run it within its memory.
        """
        rollout = self.config.rollout
        model = self.config.model
        path = str(Path(model.path).expanduser())
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=model.trust_remote_code)
        request = EngineRequest(
            self.device,
            getattr(torch, dtype),
            rollout.prompt_length,
            num_rows,
            self.rank,
            self.world_size,
            tensor_parallel_size=devices_per_engine(rollout, model, self.device),
        )
        self.engine = build_rollout_engine(rollout, model, request)
        self.engine.keeps_kv = not self.settings.recompute_kv
        self.agent = self.agent_factory(tokenizer, self.engine)
        self.service = TrajectoryService(self.agent)
        self._thread = threading.Thread(target=self._serve, name="rollouts", daemon=True)
        self._thread.start()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def load_weights(self, weights: list[Any], version: int) -> None:
        """Order the engine to take the whole model as weights `version`, between two engine steps.

        The call returns at once.

        Args:
            weights: the results of `ActorRolloutRefWorker.export_weights` on every rank. Rank 0 gives the
                pairs, the meeting point of the group that gets them, or the folder that it writes them to.
                The others give None.
            version: the version of the weights.
        """
        started = time.perf_counter()
        arrival = Future[Sequence[tuple[str, Tensor]]]()
        given = weights[0]
        if isinstance(given, MeetingPoint):
            self._reader = self._reader or CollectiveReader(self.rank, self.device)
            arrival = self._passing.submit(self._reader.read, given, self.settings.group_deadline)
        elif isinstance(given, Path):
            from verl.utils.weight_files import WeightReader

            self._reader = self._reader or WeightReader(given, f"rollout-{self.rank}")
            arrival = self._passing.submit(self._reader.read, version, self.settings.group_deadline)
        else:
            arrival.set_result(given)
            self._sync_bytes += sum(tensor.nbytes for _, tensor in given)

        def load() -> None:
            self.engine.load_weights(arrival.result(), version)
            self._sync_delays.append(time.perf_counter() - started)

        self._order(lambda: self.service.load_weights(load, not self.settings.in_flight_updates))

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, blocking=False)
    def submit(self, rows: DataProto | None) -> None:
        """Start rows, or resume them.

        Args:
            rows: rows as `EnvironmentAgent.run_llm_loop` takes them, with a column `member`. The driver gives
                a list with one entry for each rank. None means that this rank gets no rows.
        """
        if rows is not None:
            self._order(partial(self._begin, rows))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def poll(self, seconds: float) -> DataProto | None:
        """Return the rows that have ended since the last call, with `uid` and `member`.

        Wait up to `seconds` for the first of them. Return None if none has ended. Raises RolloutFailed if the
        loop failed.
        """
        with self._over:
            self._over.wait_for(lambda: self._ended or self._failure, seconds)
            self._check()
            ended = self._ended
            self._ended = []
        return self._batch(ended)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def cancel(self, uids: set[str]) -> None:
        """End the rows of these groups. `poll` may still return those that have ended already."""

        def end() -> None:
            rows = [row for row, columns in self._columns.items() if columns.get("uid") in uids]
            self.service.cancel(rows)
            for row in rows:
                del self._columns[row]

        self._order(end)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def continuations(self) -> DataProto | None:
        """Return the rows that were submitted and not yet polled, as `run_llm_loop` gives them.

        Rows that are still running have the finish reason "kept". Return None if there are no rows.
        """
        result: Future[DataProto | None] = Future()

        def note() -> None:
            running = [
                (trajectory, self._columns[trajectory.row])
                for trajectory in self.service.snapshot()
                if trajectory.row in self._columns
            ]
            result.set_result(self._batch([*self._ended, *running]))

        self._order(note)
        return self._result(result)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Generate as `ActorRolloutRefWorker.generate_sequences` does, with the newest weights.

        The prompts run beside the rows that were submitted.
        """
        done: Future[list[Trajectory]] = Future()
        self._order(partial(self._begin, prompts, done))
        return self.agent.batch(self._result(done), prompts.non_tensor_batch, {})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def figures(self) -> dict[str, float]:
        """Return metrics of the time since the last call.

        They are `rollout/*` of the engine, those of the agent, `async/rollout_idle_seconds`,
        `async/sync_bytes` (bytes of the weights that came) and `async/sync_delay_seconds` (the mean over the
        weights that came, if any did).
        """
        result: Future[dict[str, float]] = Future()

        def take() -> None:
            metrics = self.service.engine_load.metrics() | self.agent.figures(self._figured)
            metrics["async/rollout_idle_seconds"] = self._idle_seconds
            num_bytes = self._sync_bytes + (self._reader.num_bytes if self._reader else 0)
            metrics["async/sync_bytes"] = float(num_bytes - self._noted_bytes)
            if self._sync_delays:
                metrics["async/sync_delay_seconds"] = mean(self._sync_delays)
            self.service.engine_load = EngineLoad(self.engine)
            self._idle_seconds = 0.0
            self._figured = []
            self._noted_bytes = num_bytes
            self._sync_delays = []
            result.set_result(metrics)

        self._take_order(take)  # this order does not wait for weights
        return self._result(result)

    def close(self) -> None:
        self._closing = True
        if self._reader is not None:
            self._reader.close()
        self._passing.shutdown(wait=False, cancel_futures=True)
        self._take_order(lambda: None)
        if self._thread is not None:
            self._thread.join(JOIN_SECONDS)
            self.agent.close()
            if not self._thread.is_alive():  # otherwise a step of the engine is under way
                self.engine.shutdown()
        super().close()

    def _order(self, run: Job) -> None:
        """Have the loop run a job, after the weights that were announced before it have arrived."""
        self._passing.submit(self._take_order, run)

    def _take_order(self, run: Job) -> None:
        self._orders.put(run)
        complete_future(self._bell)

    def _result(self, future: Future[Any]) -> Any:
        """Wait for a future that the loop sets, and return its result.

        Raises RolloutFailed if the loop failed, or if the engine makes no step for `group_deadline` seconds.
        """
        last_num_steps = -1
        last_progress = time.monotonic()
        while not future.done():
            self._check()
            wait([future], 0.05)
            if self.service.num_steps != last_num_steps:
                last_num_steps = self.service.num_steps
                last_progress = time.monotonic()
            elif time.monotonic() - last_progress > self.settings.group_deadline:
                raise RolloutFailed(
                    f"rollout process {self.rank} has made no step of its engine for "
                    f"{self.settings.group_deadline:g} s (trainer.async_training.group_deadline)"
                )
        return future.result()

    def _check(self) -> None:
        if self._failure:
            raise RolloutFailed(f"rollout process {self.rank}: {self._failure}")

    def _serve(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # a thread begins with device 0
        try:
            with torch.no_grad():
                while not self._closing:
                    # a new bell before the loop looks at the orders, so that it misses none
                    bell = self._bell = Future[None]()
                    while not self._orders.empty():
                        self._orders.get()()
                    if not self.service.is_idle:
                        self.service.advance(bell)
                        self._give_out(self.service.take_finished())
                    else:
                        started = time.perf_counter()
                        bell.result()
                        self._idle_seconds += time.perf_counter() - started
        except BaseException:
            with self._over:
                self._failure = traceback.format_exc()
                self._over.notify_all()
        finally:
            self.service.end()

    def _begin(self, rows: DataProto, done: Future[list[Trajectory]] | None = None) -> None:
        numbers = [next(self._rows) for _ in range(len(rows))]
        episodes = self.agent.episodes(rows, numbers, self.agent.sampling_params(rows.meta_info))
        if done is None:
            columns = {
                name: column for name, column in rows.non_tensor_batch.items() if name != "continuation"
            }
            for index, number in enumerate(numbers):
                self._columns[number] = {name: column[index] for name, column in columns.items()}
        else:
            self._asked[done] = [episode.trajectory for episode in episodes]
        self.service.add(episodes)

    def _give_out(self, trajectories: Sequence[Trajectory]) -> None:
        if not trajectories:
            return
        self._figured += trajectories
        for done, requested in list(self._asked.items()):
            if all(trajectory.finish_reason for trajectory in requested):
                done.set_result(self._asked.pop(done))
        with self._over:
            for trajectory in trajectories:
                if trajectory.row in self._columns:
                    self._ended.append((trajectory, self._columns.pop(trajectory.row)))
            self._over.notify_all()

    def _batch(self, rows: Sequence[SubmittedRow]) -> DataProto | None:
        if not rows:
            return None
        trajectories = [trajectory for trajectory, _ in rows]
        names = [name for name in rows[0][1] if name != "episode"]
        columns = {name: [row_columns[name] for _, row_columns in rows] for name in names}
        return self.agent.batch(trajectories, columns, {})
