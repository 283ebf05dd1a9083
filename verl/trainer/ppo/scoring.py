"""Scores of trajectories, and the advantages that the update learns from.

reward function -> less search cost and overlong penalty -> token_level_scores [N, R]
                -> em, reward_extra (all that it returned, by name)
scores, the passes' columns -> AdvantageInputs -> advantages, returns [N, R]
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from verl.algos.advantages import (
    AdvantageInputs,
    Groups,
    RunningBaseline,
    estimate_advantages,
    expand_to_tokens,
)
from verl.algos.group_estimators import thrift_advantages
from verl.algos.kl_and_entropy import FixedKLController, apply_kl_penalty
from verl.algos.rollout_correction import apply_rollout_correction, mask_rejected_tokens
from verl.checkpoints.run_state import RunStopped
from verl.config import Config
from verl.config.environments import VerifiersConfig
from verl.config.schema import AlgorithmConfig
from verl.environments.registry import SEARCH
from verl.planning.passes import Passes
from verl.protocol import DataProto, object_array
from verl.trainer.ppo.episodes import (
    add_to_outcome,
    apply_search_cost,
    environment_of,
    overlong_penalty,
    room_left,
)
from verl.utils.reward_score import (
    RewardFunction,
    RewardFunctionFailed,
    call_reward_function,
    is_score,
    qa_em,
)
from verl.utils.reward_score import default_compute_score as exact_match
from verl.utils.reward_score.qa_em import documents_hold_answer, em_check, f1_check, known_answers
from verl.utils.reward_score.qa_em_format import Segment
from verl.utils.text import printable, short_repr
from verl.verifiers.registry import UNVERIFIED, Assigned, Verifiers, assigned_verifiers
from verl.verifiers.verifier import Sample, VerifierLimit, VerifierSettings

_PROTOCOL_TAGS = frozenset(
    f"<{slash}{name}>" for name in ("think", "search", "information", "answer") for slash in ("", "/")
)
ESTIMATOR_COLUMNS = ("values", "old_log_probs", "sum_pi_squared", "rollout_is_weights", "reward_baselines")
# A row is solved from this sum of its environment's rewards on, as with the default of `solved_at`.
FULL_REWARD = 1.0


class RewardManager:
    """A scorer of trajectories, which puts each row's score on its last sampled token.

    A row whose environment gave rewards has their sum. Any other row that names verifiers
    (`verl/verifiers/registry.py`) is scored by them, and all the rest by the reward function. Only what the
    policy sampled is read as an answer; the format reward looks at the observations too. Nothing that is
    decoded here is ever encoded again.

    Args:
        tokenizer: the policy's tokenizer, to decode with.
        num_examine: number of trajectories of each data source that every call prints.
        compute_score: the reward function, in any form that `call_reward_function` knows; None for exact
            match. It is called with data_source, solution_str (the policy's text), ground_truth and
            extra_info (with `segments`, the response in runs). It returns a number, a dictionary with "score"
            and more numbers, or None if it could not verify the row.
        verifiers: the verifiers of the run; None for verifiers with their default settings.
        stops: whether RunStopped is raised if too many rows could not be verified.
    """

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int = 0,
        compute_score: RewardFunction | None = None,
        verifiers: Verifiers | None = None,
        stops: bool = True,
    ) -> None:
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.stops = stops
        self.compute_score = compute_score or exact_match
        self.verifiers = verifiers or Verifiers(VerifierSettings(VerifiersConfig()))
        ids = set(tokenizer.all_special_ids)
        tags = {id_ for id_ in ids if tokenizer.convert_ids_to_tokens(id_) in _PROTOCOL_TAGS}
        self._silent_ids = np.array(sorted(ids - tags), dtype=np.int64)

    def __call__(self, data: DataProto, return_dict: bool = False) -> Any:
        """Score every row; a row without a sampled token scores 0.

        Args:
            data: a batch with responses and response_mask [N, R] int64, and with data_source (str),
                reward_model (dict with ground_truth) and extra_info (dict) of each row.
            return_dict: whether to return everything that is known about the rows, not the scores alone.

        Returns:
            token_level_scores [N, R] float32, zero but for the last sampled token of each row. With
            return_dict, a dictionary with this tensor as "reward_tensor" and lists of N: "score", "em" and
            "f1" (float; exact match and token F1 whatever the reward is), "answer" (str or None), what a
            user's function returned beside its score, and with verifiers "verdicts" (see `RowResult`). Where
            there is no verdict, the score is None and the tensor's row is zero.

        Raises:
            RunStopped: if the reward function raised an error, or too many rows could not be verified.
        """
        mask = data.tensors["response_mask"]
        scores = torch.zeros(mask.shape, dtype=torch.float32)
        rows = self._score_rows(data)
        printed: Counter[str] = Counter()
        for i, (source, row) in enumerate(zip(data.non_tensor_batch["data_source"], rows, strict=True)):
            sampled = mask[i].nonzero()
            if len(sampled) and row["score"] is not None:
                scores[i, int(sampled[-1])] = row["score"]
            printed[source] += 1
            if printed[source] <= self.num_examine:
                score = UNVERIFIED if row["score"] is None else f"score {row['score']:g}"
                print(printable(f"[{source}] {score}, answer {row['answer']}\n{row['text']}\n"))
        if not return_dict:
            return scores
        names = dict.fromkeys(name for row in rows for name in row if name != "text")
        return {"reward_tensor": scores, **{name: [row.get(name) for row in rows] for name in names}}

    def segments(self, data: DataProto, with_observed: bool = True) -> list[list[Segment]]:
        """Return the text of each row's response in runs of sampled and of observed tokens, without padding.

        Special tokens (end of sequence and the like) leave no text, unless they are the protocol's tags.

        Args:
            data: a batch with responses, response_mask and attention_mask.
            with_observed: whether observed runs are returned too. They are most of a trajectory's text, and
                decoding them takes most of the time.
        """
        responses = data.tensors["responses"].cpu().numpy()
        mask = data.tensors["response_mask"].cpu().numpy().astype(bool)
        attention = data.tensors["attention_mask"][:, -responses.shape[1] :].cpu().numpy().astype(bool)
        spans: list[list[bool]] = []
        ids: list[np.ndarray] = []
        for row, sampled, is_token in zip(responses, mask, attention, strict=True):
            row = row[is_token]
            sampled = sampled[is_token]
            cuts = np.flatnonzero(np.diff(sampled)) + 1
            runs = np.split(row, cuts) if len(row) else []
            kinds = [bool(sampled[start]) for start in (0, *cuts)] if len(row) else []
            ids += [run for run, kind in zip(runs, kinds, strict=True) if kind or with_observed]
            spans.append([kind for kind in kinds if kind or with_observed])
        texts = iter(self._texts(ids))
        return [[Segment(next(texts), sampled) for sampled in row] for row in spans]

    def _texts(self, runs: Sequence[np.ndarray]) -> list[str]:
        """Return the text of each run of token ids; equal runs are decoded once."""
        if not runs:
            return []
        ids = np.concatenate(runs)
        is_visible = ~np.isin(ids, self._silent_ids)
        num_visible = np.concatenate([[0], np.cumsum(is_visible)])  # before each token, and in all
        ends = num_visible[np.cumsum([len(run) for run in runs])]
        visible_runs = np.split(ids[is_visible], ends[:-1])
        keys = [run.tobytes() for run in visible_runs]
        distinct = dict(zip(keys, visible_runs, strict=True))
        text_of = dict(zip(distinct, self._decode(list(distinct.values())), strict=True))
        return [text_of[key] for key in keys]

    def _decode(self, runs: list[np.ndarray]) -> list[str]:
        """Return the text of each run of token ids."""
        if isinstance(self.tokenizer, PreTrainedTokenizerFast):  # the backend skips conversions
            backend = self.tokenizer.backend_tokenizer
            return [backend.decode(run.tolist(), skip_special_tokens=False) for run in runs]
        return self.tokenizer.batch_decode(runs, clean_up_tokenization_spaces=False)

    def _score_rows(self, data: DataProto) -> list[dict[str, Any]]:
        """Return for each row score (float or None), em, f1, answer, text, and whatever its scorer adds."""
        tensors = data.tensors
        fields = data.non_tensor_batch
        rows: list[dict[str, Any]] = []
        assignments: dict[int, list[Assigned]] = {}  # row -> its verifiers
        called: dict[int, dict[str, Any]] = {}  # row -> arguments of the reward function
        is_prompt_token = tensors["attention_mask"][:, : tensors["prompts"].shape[1]].bool()
        num_sampled = tensors["response_mask"].sum(-1).tolist()
        reads_observed = self.compute_score is not exact_match
        for i, segments in enumerate(self.segments(data, reads_observed)):
            text = qa_em.join_turns(segment.text for segment in segments if segment.sampled)
            answer = qa_em.extract_solution(text)
            rows.append({"score": 0.0, "em": 0.0, "f1": 0.0, "answer": answer, "text": text})
            if not any(segment.sampled for segment in segments):
                continue
            columns = {str(name): column[i] for name, column in fields.items()}
            reward = columns["trajectory"].get("env_reward") if "trajectory" in columns else None
            if reward is not None:  # its environment has scored it
                rows[i]["score"] = float(reward)
                continue
            truth = columns["reward_model"].get("ground_truth")
            extra = columns["extra_info"]
            if answer is not None:
                golden = known_answers(truth)
                rows[i] |= {"em": float(em_check(answer, golden)), "f1": f1_check(answer, golden)}
            try:
                assigned = assigned_verifiers(columns["reward_model"], columns)
            except ValueError as error:
                raise RunStopped(f"row {i} of the batch: {error}") from error
            if assigned:
                assignments[i] = assigned
            else:
                called[i] = {
                    "data_source": columns["data_source"],
                    "solution_str": text,
                    "ground_truth": truth,
                }
                called[i]["extra_info"] = {**extra, "segments": segments}
        prompts = self._texts([tensors["prompts"][i][is_prompt_token[i]].cpu().numpy() for i in assignments])
        samples = [
            Sample(rows[i]["text"], None, prompt, num_sampled[i], fields["extra_info"][i])
            for i, prompt in zip(assignments, prompts, strict=True)
        ]
        try:
            results = self.verifiers.verify(list(zip(samples, assignments.values(), strict=True)))
            scores = call_reward_function(self.compute_score, list(called.values()))
        except (ValueError, VerifierLimit) as error:
            raise RunStopped(f"the verifiers: {error}") from error
        except RewardFunctionFailed as error:
            raise RunStopped(f"the reward function failed: {error}") from error
        for i, result in zip(assignments, results, strict=True):
            rows[i] |= {"score": result.score, "verdicts": result.verdicts}
        for i, returned in zip(called, scores, strict=True):
            fields_returned = dict(returned) if isinstance(returned, Mapping) else {"score": returned}
            rows[i] |= fields_returned | {"em": rows[i]["em"]}
            rows[i]["score"] = None if rows[i]["score"] is None else float(rows[i]["score"])
        unverified = [row for row in rows if row["score"] is None]
        limit = self.verifiers.settings.config.max_failed_share
        if (
            self.stops
            and unverified
            and (len(unverified) > limit * len(rows) or len(unverified) == len(rows))
        ):
            reports = [
                verdict
                for row in unverified
                for verdict in row.get("verdicts", ())
                if verdict["score"] is None
            ]
            names = ", ".join(sorted({report["name"] for report in reports})) or "the reward function"
            reason = f": {reports[-1]['detail']}" if reports else ""
            raise RunStopped(
                f"{len(unverified)} of {len(rows)} trajectories could not be verified by {names} "
                f"(verifiers.max_failed_share={limit:g}){reason}"
            )
        return rows


def score(batch: DataProto, reward_fn: RewardManager, config: Config) -> None:
    """Add the scores of training to a batch: what `score_answers` adds, less costs and penalties.

    Each row also gets `reward_extra`: a dict with the score before costs and penalties, and with whatever the
    reward function returned. Metrics go to meta_info `metrics`.
    """
    answers = score_answers(batch, reward_fn)
    num_searches = [row["num_searches"] for row in batch.non_tensor_batch["trajectory"]]
    reward = config.reward_model
    scores = apply_search_cost(answers.pop("reward_tensor"), num_searches, reward.search_cost)
    overlong = reward.overlong_buffer
    if overlong.enable:
        max_turns = config.max_turns if config.do_search else 0
        room = room_left(batch, config.data.max_prompt_length, config.data.max_response_length, max_turns)
        penalty = overlong_penalty(room, overlong.len, overlong.penalty_factor)
        scores = add_to_outcome(scores, batch.tensors["response_mask"], penalty)
        batch.meta_info.setdefault("metrics", {})["filter/overlong_penalty"] = float(penalty.mean())
    batch.tensors["token_level_scores"] = scores
    batch.tensors["outcome"] = scores.sum(-1)
    rows = [dict(zip(answers, values, strict=True)) for values in zip(*answers.values(), strict=True)]
    batch.non_tensor_batch["reward_extra"] = object_array(rows)


def score_answers(batch: DataProto, reward_fn: RewardManager) -> dict[str, Any]:
    """Add the reward function's scores to a batch; return all that the function returned.

    The scores are token_level_scores [N, R] float32 (the outcome on the last sampled token), outcome [N]
    float32, num_sampled, prompt_length, response_length [N] int64 (tokens), and for each row `em`, `f1`
    (float) and `verdicts` (see `RowResult`, or None). A row that could not be verified leaves the batch as
    one whose search failed does: its response_mask is emptied, and its record's finish_reason is
    "unverified".
    """
    answers: dict[str, Any] = reward_fn(batch, return_dict=True)
    tensors = batch.tensors
    fields = batch.non_tensor_batch
    unverified = torch.tensor([value is None for value in answers["score"]])
    if unverified.any():
        for name in {"response_mask", "rollout_log_probs"} & set(tensors.keys()):
            tensors[name] = tensors[name].masked_fill(unverified[:, None], 0)
        records = fields["trajectory"].copy()
        for i in unverified.nonzero().flatten().tolist():
            records[i] = {**records[i], "finish_reason": UNVERIFIED}
        fields["trajectory"] = records
    fields["verdicts"] = object_array(answers.pop("verdicts", [None] * len(batch)))
    mask = tensors["response_mask"]
    attention = tensors["attention_mask"]
    scores = answers["reward_tensor"]
    tensors["token_level_scores"] = scores
    tensors["outcome"] = scores.sum(-1)
    tensors["num_sampled"] = mask.sum(-1)
    tensors["prompt_length"] = attention[:, : -mask.shape[1]].sum(-1)
    tensors["response_length"] = attention[:, -mask.shape[1] :].sum(-1)
    fields["em"] = np.array(answers["em"], dtype=object)
    fields["f1"] = np.array(answers["f1"], dtype=object)
    return answers


def scores_by(batch: DataProto, column: str, usable: np.ndarray) -> dict[Any, list[float]]:
    """Return the scores of the usable rows, before costs and penalties, by the value of the column."""
    scores: dict[Any, list[float]] = defaultdict(list)
    values = batch.non_tensor_batch[column]
    extra = batch.non_tensor_batch["reward_extra"]
    for value, row, is_usable in zip(values, extra, usable, strict=True):
        if is_usable:
            scores[value].append(float(row["score"]))
    return scores


def values_named(batch: DataProto, name: str, key: str) -> np.ndarray:
    """Return the numbers that the reward function returned under a name, [N] float64.

    Args:
        batch: scored rows. Those without a token have NaN.
        name: name of the numbers.
        key: the configuration key that asks for them, for the message.

    Raises:
        RunStopped: if the function returned no such number for a row.
    """
    rows = batch.non_tensor_batch["reward_extra"]
    num_sampled = batch.tensors["num_sampled"].tolist()
    values = [math.nan if row.get(name) is None else _finite(row[name]) for row in rows]
    for row, num, value in zip(rows, num_sampled, values, strict=True):
        if num and row.get(name) is not None and math.isnan(value):
            raise RunStopped(
                f"the reward function returned {name}={short_repr(row[name])} for the answer "
                f"{short_repr(row.get('answer'))}; expected a finite number ({key})."
            )
        if num and row.get(name) is None:
            numbers = ", ".join(
                sorted(other for other, value in row.items() if isinstance(value, int | float))
            )
            raise RunStopped(
                f"{key} asks for {name!r}, but the reward function returned {numbers}; let it return a "
                f"dictionary with {name!r}, or change {key}."
            )
    return np.array(values)


def add_advantages(
    batch: DataProto,
    algorithm: AlgorithmConfig,
    passes: Passes,
    kl_controller: FixedKLController,
    running_baseline: RunningBaseline,
) -> dict[str, float]:
    """Add rewards, advantages and returns to a step's batch; return metrics.

    The function also adds which tokens the update leaves out, how the update weighs the others, and with
    `rollout.step_wise` their turns. With `algorithm.thrift` the batch's meta_info must have `solved_share`
    (see the function of that name).

    Raises RunStopped for rewards that the estimator can't take.
    """
    tensors = batch.tensors
    metrics = apply_rollout_correction(batch, algorithm.rollout_correction)
    if passes.kl_in_reward:
        metrics |= apply_kl_penalty(batch, kl_controller, algorithm.kl_penalty)
    else:
        tensors["token_level_rewards"] = tensors["token_level_scores"]
    inputs = advantage_inputs(batch, algorithm, passes, running_baseline)
    try:
        advantages, returns = estimate_advantages(algorithm.adv_estimator, inputs)
    except ValueError as error:
        raise RunStopped(f"the advantages of this step: {error}") from error
    if algorithm.thrift:
        thrift = algorithm.thrift * thrift_per_token(batch, batch.meta_info["solved_share"])
        advantages = advantages + thrift
        metrics["thrift/advantage_share"] = advantage_share(thrift, advantages, tensors["response_mask"])
    tensors["advantages"] = advantages
    tensors["returns"] = returns
    if passes.step_wise:
        tensors["turn_ids"] = turn_ids(batch)
    if inputs.baseline_keys is not None:
        mask = tensors["response_mask"]
        running_baseline.update(tensors["token_level_rewards"], mask, inputs.baseline_keys)
    mask_rejected_tokens(batch)
    return metrics


def advantage_inputs(
    batch: DataProto, algorithm: Mapping[str, Any], passes: Passes, running_baseline: RunningBaseline
) -> AdvantageInputs:
    """Return the inputs of the estimator for a step.

    They are all that the passes have written into the batch, and what the estimator asks for of the records.

    Args:
        batch: all rows of the step, with token_level_rewards.
        algorithm: the `algorithm` block of the configuration.
        passes: what the run computes.
        running_baseline: the running mean of the rewards, for estimators that take it.
    """
    tensors = batch.tensors
    input_names = passes.estimator_inputs
    inputs: dict[str, Any] = {
        "token_level_rewards": tensors["token_level_rewards"],
        "response_mask": tensors["response_mask"],
        "index": batch.non_tensor_batch["uid"],
        "config": algorithm,
        "turn_credit": passes.turn_credit,
        **{name: algorithm[name] for name in ("gamma", "lam", "norm_adv_by_std_in_grpo")},
        **{name: tensors[name] for name in ESTIMATOR_COLUMNS if name in tensors},
    }
    if "running_baseline" in input_names:
        sources = [str(source) for source in batch.non_tensor_batch["data_source"]]
        inputs |= {"running_baseline": running_baseline, "baseline_keys": sources}
    if "reward_components" in input_names:
        keys = passes.reward_keys
        components = {name: values_named(batch, name, "algorithm.gdpo_reward_keys") for name in keys}
        inputs["reward_components"] = {name: torch.from_numpy(x).float() for name, x in components.items()}
        weights = algorithm["gdpo_reward_weights"] or [1.0] * len(keys)
        inputs["reward_weights"] = dict(zip(keys, weights, strict=True))
    if "turn_ids" in input_names:
        inputs["turn_ids"] = turn_ids(batch)
    if "turn_rewards" in input_names:
        inputs["turn_rewards"] = turn_rewards(batch)
    return AdvantageInputs(**inputs)


def solved_rows(batch: DataProto) -> np.ndarray:
    """Return which rows of a scored batch are solved, [N] bool.

    Nothing else decides this. A row is solved or not, whatever its score is made of (a format, F1, parts,
    costs, penalties). It depends on what has scored the row:

    - its environment: the rewards add up to `FULL_REWARD` or more;
    - its verifiers: every verifier with a weight gave the best score that it can give;
    - the reward function: `acc`, if the function returned it, is 1 or more; else the answer is an exact match
      (`em`).

    A row without a sampled token is not solved.
    """
    fields = batch.non_tensor_batch
    solved = np.zeros(len(batch), dtype=bool)
    for row in batch.tensors["num_sampled"].nonzero().flatten().tolist():
        env_reward = fields["trajectory"][row].get("env_reward")
        verdicts = fields["verdicts"][row]
        if env_reward is not None:
            solved[row] = env_reward >= FULL_REWARD
        elif verdicts is not None:
            weighed = [verdict for verdict in verdicts if verdict["weight"]]
            is_full = [verdict["weight"] * verdict["score"] >= verdict["full_score"] for verdict in weighed]
            solved[row] = bool(weighed) and all(is_full)
        else:
            accuracy = fields["reward_extra"][row].get("acc")
            solved[row] = float(fields["em"][row] if accuracy is None else accuracy) >= 1
    return solved


def searching_rows(batch: DataProto) -> np.ndarray:
    """Return which rows may search, [N] bool.

    They are the rows of the search environment, and of every other environment of which a row of this batch
    searched.
    """
    records = batch.non_tensor_batch["trajectory"]
    searching = {SEARCH} | {environment_of(record) for record in records if record["num_searches"]}
    return np.array([environment_of(record) in searching for record in records], dtype=bool)


def solved_share(batch: DataProto) -> float:
    """Return the share of solved rows among those that may search and have a sampled token.

    The share is 0 without such rows.

    Args:
        batch: all rows that a step has generated, before any of them is left out.
    """
    rows = torch.from_numpy(searching_rows(batch)) & (batch.tensors["num_sampled"] > 0)
    solved = torch.from_numpy(solved_rows(batch)).double()
    return float(Groups(torch.zeros_like(rows, dtype=torch.int64), rows).mean(solved)[0])


def thrift_by_row(batch: DataProto, compared: Tensor, share: float) -> Tensor:
    """Return `thrift_advantages` of a scored batch, [N] float64.

    Args:
        batch: a scored batch.
        compared: the rows that are compared, [N] bool.
        share: see `solved_share`.
    """
    groups = Groups.of(batch.non_tensor_batch["uid"], compared)
    solved = torch.from_numpy(solved_rows(batch))
    searches = torch.tensor([record["num_searches"] for record in batch.non_tensor_batch["trajectory"]])
    return thrift_advantages(solved, searches, groups, share)


def thrift_per_token(batch: DataProto, share: float) -> Tensor:
    """Return `thrift_by_row` on every sampled token of a row, [N, R] float32."""
    mask = batch.tensors["response_mask"].bool()
    return expand_to_tokens(thrift_by_row(batch, mask.any(dim=-1), share), mask, torch.float32)[0]


def can_save_searches(batch: DataProto, usable: np.ndarray) -> np.ndarray:
    """Return the usable rows of groups to which `algorithm.thrift` gives an advantage, [N] bool.

    The solved rows of such a group differ in the number of searches.
    """
    is_usable = torch.from_numpy(usable)
    thrift = thrift_by_row(batch, is_usable, share=1.0)
    most = Groups.of(batch.non_tensor_batch["uid"], is_usable).max(thrift)
    can_save: np.ndarray = (is_usable & (most > 0)).numpy()
    return can_save


def advantage_share(summand: Tensor, advantages: Tensor, mask: Tensor) -> float:
    """Return the sum of |part| divided by the sum of |advantages|, or 0 if all advantages are 0.

    The part is a summand of the advantages. All tensors are [N, R]. Only tokens under the mask count.
    """
    sampled = mask.bool()
    total = float(advantages[sampled].double().abs().sum())
    return float(summand[sampled].double().abs().sum()) / total if total else 0.0


def _finite(value: Any) -> float:
    """Return a number that float32 holds as a float, and NaN for everything else."""
    return float(value) if is_score(value) else math.nan


def turn_ids(batch: DataProto) -> Tensor:
    """Return the number of the turn, from 0, that each sampled token belongs to, [N, R] int64; -1 elsewhere.

    The numbers come from the spans in the trajectories' records, so that turns are told apart even where they
    border on each other.
    """
    mask = batch.tensors["response_mask"].bool()
    ids = torch.full(mask.shape, -1, dtype=torch.int64)
    for row, record in enumerate(batch.non_tensor_batch["trajectory"]):
        for number, turn in enumerate(record["turns"]):
            ids[row, turn["start"] : turn["end"]] = number
    return ids.masked_fill(~mask, -1)


def turn_rewards(batch: DataProto) -> Tensor:
    """Return the reward of each turn, [N, T] float32, with NaN where a turn has none.

    T is the largest number of turns of a row. A reward function that returns `turn_rewards` (a list with one
    number or None a turn) decides, or else an environment that gives its turns rewards. Otherwise a search is
    worth 1 if it is the first of its trajectory whose documents hold a golden answer, and 0 if not, so that
    asking again wins nothing; other turns have no reward.

    Raises RunStopped if a row has another number of rewards than of turns.
    """
    fields = batch.non_tensor_batch
    rows = []
    columns = (fields[name] for name in ("trajectory", "reward_extra", "reward_model"))
    for record, extra, reward_model in zip(*columns, strict=True):
        turns = record["turns"]
        rewards = extra.get("turn_rewards")
        if rewards is None and record.get("env_reward") is not None:
            rewards = [turn["reward"] for turn in turns]
        if rewards is None:
            golden = known_answers(reward_model["ground_truth"])
            was_hit = False
            rewards = []
            for turn in turns:
                is_search = bool(golden) and turn.get("documents") is not None
                is_hit = is_search and not was_hit and documents_hold_answer(turn["documents"], golden)
                was_hit = was_hit or is_hit
                rewards.append(float(is_hit) if is_search else None)
        if len(rewards) != len(turns):
            raise RunStopped(
                f"the reward function returned {len(rewards)} turn_rewards for a trajectory of {len(turns)} "
                "turns; expected one number (or None) a turn"
            )
        values = [math.nan if value is None else _finite(value) for value in rewards]
        for reward, value in zip(rewards, values, strict=True):
            if reward is not None and math.isnan(value):
                raise RunStopped(
                    f"the reward function returned {short_repr(reward)} among turn_rewards; expected a "
                    "finite number (or None) a turn"
                )
        rows.append(values)
    width = max(1, *map(len, rows)) if rows else 1
    return torch.tensor([row + [math.nan] * (width - len(row)) for row in rows], dtype=torch.float32)
