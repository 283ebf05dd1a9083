"""The sets of `trainer.evals`: rows that are asked while a run trains, and never trained on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from verl.config.mixture import HeldOut
from verl.evaluation.figures import LOST, rollout_seed, summarize
from verl.protocol import DataProto
from verl.trainer.ppo.collection import prompt_batch
from verl.trainer.ppo.scoring import RewardManager
from verl.trainer.ppo.validation import ask, question_records
from verl.utils.announcing import announced
from verl.utils.dataset.rl_dataset import RLHFDataset


@dataclass(frozen=True)
class HeldOutSets:
    """All of a run. batch_size: rollouts in flight at once; None: all of a set. seed: of their sampling."""

    sets: Sequence[tuple[HeldOut, RLHFDataset]]
    reward_fn: RewardManager
    batch_size: int | None
    seed: int

    @property
    def most_rollouts(self) -> int:
        """Of a set."""
        return max((len(rows) * each.rollouts for each, rows in self.sets), default=0)

    def measure(
        self, generate: Callable[[DataProto], DataProto], step: int, last: bool
    ) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Those that are due after a step, the last one of the run or not: `eval/<name>/` avg@k, pass@j for
        j <= k, em, f1, searches, completion_len, unverified, truncated (`verl/evaluation/figures.py`), and a
        line for each rollout. A figure over no rollout is missing. Equal seeds give equal draws.
        """
        metrics: dict[str, float] = {}
        lines: list[dict[str, Any]] = []
        for held_out, rows in self.sets:
            if not last and step % held_out.every:
                continue
            with announced(f"evaluation {held_out.name} of {len(rows)} questions"):
                own = self._ask(generate, held_out, rows)
            summary = summarize(own, held_out.solved_at)
            figures = {name: value[0] for name, value in summary.items() if isinstance(value, list)}
            of_verified = {name: summary[name] for name in ("searches", "completion_len")}
            figures |= {name: value for name, value in of_verified.items() if value is not None}
            figures |= {name: float(summary[f"num_{name}"]) for name in ("unverified", "truncated")}
            metrics |= {f"eval/{held_out.name}/{name}": value for name, value in figures.items()}
            lines += own
        return metrics, lines

    def _ask(
        self, generate: Callable[[DataProto], DataProto], held_out: HeldOut, rows: RLHFDataset
    ) -> list[dict[str, Any]]:
        places = [(example, i) for example in range(len(rows)) for i in range(held_out.rollouts)]
        lines: list[dict[str, Any]] = []
        size = self.batch_size or len(places)
        for start in range(0, len(places), size):
            asked = places[start : start + size]
            prompts = prompt_batch([rows[example] for example, _ in asked], f"{held_out.name}-{start}")
            seeds = torch.tensor([rollout_seed(self.seed, place) for place in asked])
            batch = ask(generate, self.reward_fn, prompts, seeds, held_out.temperature)
            counts = batch.tensors["num_sampled"].tolist()
            for (example, i), count, record in zip(asked, counts, question_records(batch), strict=True):
                reason = record["finish_reason"]
                line = {"eval": held_out.name, "example_id": example, "rollout_idx": i, **record}
                line |= {"task": record["data_source"], "completion_len": count}
                line["reward"] = None if reason in LOST else record["score"]
                lines.append(line | {"is_truncated": reason == "length"})
        return lines
