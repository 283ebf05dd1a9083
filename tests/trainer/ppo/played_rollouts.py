"""Prompts and rollout processes that are played: rows start and end when chance says so."""

from __future__ import annotations

import random
from typing import Any

import torch

from verl.protocol import DataProto, object_array
from verl.workers.rollout_worker import MEMBER


class Prompts:
    """Draws prompt 0, 1, 2, .. as the collector does. trained: prompts of finished steps, where the test says
    which; then those that must not be drawn again have to be all others.
    """

    def __init__(self, rows: int, trained: list[int] | None = None) -> None:
        self.rows = rows
        self.drawn = 0
        self.trained = trained

    def drawn_ahead(self, number: int, count: int, asked: Any) -> list[DataProto]:
        if self.trained is not None:
            assert set(asked) == set(range(self.drawn)) - set(self.trained)
        indices = range(self.drawn, self.drawn + count)
        self.drawn = self.drawn + count
        return [self._rows(number + i, 0, index) for i, index in enumerate(indices)]

    def asked_again(self, prompts: DataProto, number: int, attempt: int) -> DataProto:
        return self._rows(number, attempt, int(prompts.non_tensor_batch["index"][0]))

    def _rows(self, number: int, attempt: int, index: int) -> DataProto:
        uid = f"group{number}.{attempt}"
        columns = {
            "uid": [uid] * self.rows,
            "index": [index] * self.rows,
            "raw_prompt_ids": [[1]] * self.rows,
        }
        return DataProto.from_dict({"sampling_seeds": torch.zeros(self.rows, dtype=torch.int64)}, columns)


class Sent:
    """The future of a call that was heard, or that has failed."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure = failure

    def get(self) -> None:
        if self.failure is not None:
            raise self.failure


class Played:
    """Processes whose rows start and end when chance says so; each poll lasts until one ends, at most
    five moments."""

    def __init__(self, rng: random.Random, world_size: int, speed: float, lost: float = 0.0) -> None:
        self.rng = rng
        self.world_size = world_size
        self.speed = speed
        self.lost = lost
        self.rows: list[dict[str, Any]] = []
        self.version = -1
        self.now = 0.0

    def submit(self, entries: list[DataProto | None]) -> Sent:
        assert len(entries) == self.world_size and self.version >= 0
        for rank, rows in enumerate(entries):
            for index in range(0 if rows is None else len(rows)):
                columns = {name: column[index] for name, column in rows.non_tensor_batch.items()}
                state = columns.get("continuation")
                row = {"uid": columns["uid"], "member": columns[MEMBER], "rank": rank}
                row["first"] = None if state is None else state["record"]["version_first"]
                self.rows.append(row | {"silent": self.rng.random() < self.lost})
        return Sent()

    def load_weights(self, weights: Any, version: int) -> Sent:
        self.version = version
        return Sent()

    def cancel(self, uids: set[str]) -> None:
        self.rows = [row for row in self.rows if row["uid"] not in uids]

    def poll(self, seconds: float) -> list[DataProto | None]:
        ended: list[list[dict[str, Any]]] = [[] for _ in range(self.world_size)]
        for _ in range(5):
            self.now += seconds
            going = []
            for row in self.rows:
                if row["first"] is None and self.rng.random() < 0.5:
                    row["first"] = self.version
                elif row["first"] is not None and not row["silent"] and self.rng.random() < self.speed:
                    ended[row["rank"]].append(row)
                    continue
                going.append(row)
            if len(going) < len(self.rows):
                break
        self.rows = going
        return [self._batch(rows, "answer") for rows in ended]

    def continuations(self) -> list[DataProto | None]:
        return [self._batch([r for r in self.rows if r["rank"] == k], "kept") for k in range(self.world_size)]

    def _batch(self, rows: list[dict[str, Any]], reason: str) -> DataProto | None:
        if not rows:
            return None
        records = []
        for row in rows:
            turns = [
                {"version_first": version, "start": place, "end": place + 1}
                for place, version in enumerate((row["first"], self.version))
                if row["first"] is not None
            ]
            records.append({"version_first": row["first"], "finish_reason": reason, "turns": turns})
        names = ("attention_mask", "responses", "response_mask", "rollout_log_probs")
        tensors = {name: torch.ones(len(rows), 2, dtype=torch.int64) for name in names}
        columns = {"uid": [row["uid"] for row in rows], MEMBER: [row["member"] for row in rows]}
        return DataProto.from_dict(tensors, columns | {"trajectory": object_array(records)})
