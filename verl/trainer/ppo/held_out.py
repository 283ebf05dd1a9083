"""The sets of `trainer.evals`: rows that are asked while a run trains, and never trained on.

configuration, rows of the validation --read_sets--> sets --HeldOutSets.measure--> eval/<name>/..., lines
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from verl.config import Config
from verl.config.mixture import OWN, SHUFFLED, HeldOut, evals_of
from verl.data.controls import question_of, with_retriever
from verl.data.rl_dataset import RLHFDataset
from verl.environments.registry import SEARCH
from verl.protocol import DataProto
from verl.records.figures import UNKNOWN_REWARD_REASONS, rollout_seed, summarize
from verl.trainer.ppo.collection import prompt_batch
from verl.trainer.ppo.scoring import RewardManager
from verl.trainer.ppo.validation import ask, question_records
from verl.utils.announcing import announce


def read_sets(
    config: Config, tokenizer: Any, data: Mapping[str, Any], validation: RLHFDataset
) -> list[tuple[HeldOut, RLHFDataset]]:
    """Read the sets of `trainer.evals`.

    A set without files has the rows of the validation, or `n` of them where there are more. With another
    retriever than its own, it has only the rows that search. Where no row searches it is left out, with a
    note, so that a configuration with such a set works for any rows.

    Args:
        config: the whole configuration.
        tokenizer: the policy's tokenizer.
        data: the settings of `RLHFDataset`.
        validation: the rows of `data.val_files`.

    Raises:
        ValueError: if rows can't be used (`RLHFDataset`, `with_retriever`).
    """
    sets = []
    for held_out in evals_of(config):
        source: str | Sequence[Any] = held_out.files or []
        num_rows = held_out.n
        if held_out.of_validation:
            source = validation.rows
            if held_out.retriever != OWN:
                source = [row for row in validation.rows if validation.env_class_of(row) == SEARCH]
                if not source or not config.do_search:
                    print(f"note: trainer.evals: {held_out.name} is left out: no question is searched for")
                    continue
                if (
                    held_out.retriever == SHUFFLED
                    and len({question_of(validation, row) for row in source}) < 2
                ):
                    print(f"note: trainer.evals: {held_out.name} is left out: there is no other question")
                    continue
            if num_rows is not None and num_rows >= len(source):
                num_rows = None
        rows = RLHFDataset(source, tokenizer, data, num_rows)
        seed = config.trainer.seed
        sets.append((held_out, with_retriever(rows, held_out.retriever, seed, config.max_turns)))
    return sets


@dataclass(frozen=True)
class HeldOutSets:
    """The held-out sets of a run.

    Attributes:
        sets: each set's settings, with its rows.
        reward_fn: scores the rollouts.
        batch_size: rollouts in flight at once; None for all of a set.
        seed: seed of the sampling.
    """

    sets: Sequence[tuple[HeldOut, RLHFDataset]]
    reward_fn: RewardManager
    batch_size: int | None
    seed: int

    @property
    def most_rollouts(self) -> int:
        """Return the largest number of rollouts of a set."""
        return max((len(rows) * held_out.rollouts for held_out, rows in self.sets), default=0)

    def measure(
        self, generate: Callable[[DataProto], DataProto], step: int, last: bool
    ) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Measure the sets that are due after a step.

        Equal seeds give equal draws.

        Args:
            generate: prompts -> a trajectory for each row.
            step: number of finished steps.
            last: whether the step is the last one of the run, after which all sets are due.

        Returns:
            The metrics `eval/<name>/`: avg@k, pass@j for j <= k, em, f1, searches, completion_len, unverified
            and truncated (`verl/records/figures.py`), where a figure over no rollout is missing; and a
            line for each rollout.
        """
        metrics: dict[str, float] = {}
        lines: list[dict[str, Any]] = []
        for held_out, rows in self.sets:
            if not last and step % held_out.every:
                continue
            with announce(f"evaluation {held_out.name} of {len(rows)} questions"):
                lines_of_set = self._ask(generate, held_out, rows)
            summary = summarize(lines_of_set, held_out.solved_at)
            figures = {name: value[0] for name, value in summary.items() if isinstance(value, list)}
            of_verified = {name: summary[name] for name in ("searches", "completion_len")}
            figures |= {name: value for name, value in of_verified.items() if value is not None}
            figures |= {name: float(summary[f"num_{name}"]) for name in ("unverified", "truncated")}
            metrics |= {f"eval/{held_out.name}/{name}": value for name, value in figures.items()}
            lines += lines_of_set
        return metrics, lines

    def _ask(
        self, generate: Callable[[DataProto], DataProto], held_out: HeldOut, rows: RLHFDataset
    ) -> list[dict[str, Any]]:
        draws = [(example, i) for example in range(len(rows)) for i in range(held_out.rollouts)]
        lines: list[dict[str, Any]] = []
        size = self.batch_size or len(draws)
        for start in range(0, len(draws), size):
            draws_of_batch = draws[start : start + size]
            prompts = prompt_batch(
                [rows[example] for example, _ in draws_of_batch], f"{held_out.name}-{start}"
            )
            seeds = torch.tensor([rollout_seed(self.seed, draw) for draw in draws_of_batch])
            batch = ask(generate, self.reward_fn, prompts, seeds, held_out.temperature)
            counts = batch.tensors["num_sampled"].tolist()
            for (example, i), count, record in zip(
                draws_of_batch, counts, question_records(batch), strict=True
            ):
                reason = record["finish_reason"]
                line = {"eval": held_out.name, "example_id": example, "rollout_idx": i, **record}
                line |= {"task": record["data_source"], "completion_len": count}
                line["reward"] = None if reason in UNKNOWN_REWARD_REASONS else record["score"]
                lines.append(line | {"is_truncated": reason == "length"})
        return lines
