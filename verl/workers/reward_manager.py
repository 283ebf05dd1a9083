"""Scores trajectories: token ids and masks in, one number on the last sampled token of each row out.

    responses, response_mask [N, R] -> runs of sampled / observed tokens -> text -> reward function
    -> token_level_scores [N, R] float32

Only what the policy sampled is read as an answer; the format reward looks at the observations too. Nothing
that is decoded here is ever encoded again.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import torch

from verl.utils.reward_score import RewardFunction, default_compute_score, qa_em
from verl.utils.reward_score.qa_em_format import Segment

if TYPE_CHECKING:
    from verl.protocol import DataProto

_PROTOCOL_TAGS = frozenset(
    f"<{slash}{name}>" for name in ("think", "search", "information", "answer") for slash in ("", "/")
)


def apply_search_cost(scores: torch.Tensor, num_searches: Sequence[int], cost: float) -> torch.Tensor:
    """A reward is worth less the more searches it took: score * max(0, 1 - cost * searches) if score > 0.

    A reward of 0 or less stays what it is, so that a wrong answer is never a reason to search less. Among
    right answers to one question the cost decides: GRPO then prefers the one with no search too many.

    Args:
        scores: [N, R] float32.
        num_searches: searches that were made, of each row.
        cost: share of the reward for each search; 0 changes nothing.
    """
    kept = (1.0 - cost * torch.tensor(num_searches, dtype=scores.dtype)).clamp(min=0.0).unsqueeze(1)
    return torch.where(scores > 0, scores * kept, scores)


class RewardFunctionFailed(RuntimeError):
    """A reward function raised: where, and what, in one line."""


def _described(error: Exception, function: Any) -> str:
    """The last line of the function's own file that the error came through, and the error."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    path = getattr(function, "path", None) or getattr(
        getattr(function, "__code__", None), "co_filename", None
    )
    own = [frame for frame in frames if frame.filename == str(path)] or list(frames)
    where = f"{own[-1].filename}, line {own[-1].lineno}, in {own[-1].name}: " if own else ""
    return f"the reward function failed: {where}{type(error).__name__}: {' '.join(str(error).split())}"


class RewardManager:
    """Calls the reward function of each row.

    Args:
        tokenizer: the policy's tokenizer, to decode with.
        num_examine: print this many trajectories of each data source with every call.
        compute_score: called with data_source, solution_str (the policy's text), ground_truth and extra_info
            (with `segments`, the response in runs); returns a number, or a dictionary with "score" and more
            numbers. None: by data source, which is exact match unless a source is registered otherwise.
    """

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int = 0,
        compute_score: RewardFunction | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.compute_score = compute_score or default_compute_score
        tags = {
            id_ for id_ in tokenizer.all_special_ids if tokenizer.convert_ids_to_tokens(id_) in _PROTOCOL_TAGS
        }
        self._silent_ids = np.array(sorted(set(tokenizer.all_special_ids) - tags), dtype=np.int64)

    @overload
    def __call__(self, data: DataProto, return_dict: Literal[False] = False) -> torch.Tensor: ...

    @overload
    def __call__(self, data: DataProto, return_dict: Literal[True]) -> dict[str, Any]: ...

    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | dict[str, Any]:
        """Score every row; a row without a sampled token scores 0. RewardFunctionFailed: the function raised.

        Args:
            data: responses and response_mask [N, R] int64; data_source (str), reward_model (dict with
                ground_truth), extra_info (dict) of each row.
            return_dict: return more than the scores.

        Returns:
            token_level_scores [N, R] float32, zero but for the last sampled token of each row; or a
            dictionary with it as "reward_tensor" and lists of N: "score" and "em" (float; em is exact
            match whatever the reward is), "answer" (str or None), and what a user's function returned
            beside its score.
        """
        assert data.batch is not None
        mask = data.batch["response_mask"]
        scores = torch.zeros(mask.shape, dtype=torch.float32)
        rows = [self._score_row(data, i, parts) for i, parts in enumerate(self.segments(data))]
        for i, row in enumerate(rows):
            sampled = mask[i].nonzero()
            if len(sampled):
                scores[i, int(sampled[-1])] = row["score"]
        self._print_examples(data, rows)
        if not return_dict:
            return scores
        names = dict.fromkeys(name for row in rows for name in row if name != "text")
        return {"reward_tensor": scores, **{name: [row.get(name) for row in rows] for name in names}}

    def segments(self, data: DataProto) -> list[list[Segment]]:
        """The text of each row's response in runs of sampled and of observed tokens; padding left out.

        Special tokens (end of sequence and the like) leave no text, unless they are the protocol's tags.
        """
        assert data.batch is not None
        responses = data.batch["responses"].cpu().numpy()
        mask = data.batch["response_mask"].cpu().numpy().astype(bool)
        attention = data.batch["attention_mask"][:, -responses.shape[1] :].cpu().numpy().astype(bool)
        spans: list[list[bool]] = []
        ids: list[np.ndarray] = []
        for row, sampled, real in zip(responses, mask, attention, strict=True):
            row, sampled = row[real], sampled[real]
            cuts = np.flatnonzero(np.diff(sampled)) + 1
            runs = np.split(row, cuts) if len(row) else []
            spans.append([bool(sampled[start]) for start in (0, *cuts)] if len(row) else [])
            ids += [run[~np.isin(run, self._silent_ids)] for run in runs]
        texts = iter(self.tokenizer.batch_decode(ids, clean_up_tokenization_spaces=False) if ids else [])
        return [[Segment(next(texts), sampled) for sampled in row] for row in spans]

    def _score_row(self, data: DataProto, i: int, segments: list[Segment]) -> dict[str, Any]:
        fields = data.non_tensor_batch
        ground_truth = fields["reward_model"][i]["ground_truth"]
        text = qa_em.join_turns(segment.text for segment in segments if segment.sampled)
        answer = qa_em.extract_solution(text)
        result: dict[str, Any] = {"score": 0.0, "em": 0.0, "answer": answer, "text": text}
        if not any(segment.sampled for segment in segments):
            return result
        try:
            returned = self.compute_score(
                data_source=fields["data_source"][i],
                solution_str=text,
                ground_truth=ground_truth,
                extra_info={**fields["extra_info"][i], "segments": segments},
            )
        except Exception as error:  # it is a user's function: anything may come
            raise RewardFunctionFailed(_described(error, self.compute_score)) from error
        result |= dict(returned) if isinstance(returned, Mapping) else {"score": returned}
        result["score"] = float(result["score"])
        has_golden = isinstance(ground_truth, Mapping) and ground_truth.get("target") is not None
        if has_golden and answer is not None:
            result["em"] = float(qa_em.em_check(answer, qa_em.golden_answers(ground_truth)))
        return result

    def _print_examples(self, data: DataProto, rows: list[dict[str, Any]]) -> None:
        printed: dict[str, int] = {}
        for i, row in enumerate(rows if self.num_examine else []):
            source = data.non_tensor_batch["data_source"][i]
            printed[source] = printed.get(source, 0) + 1
            if printed[source] <= self.num_examine:
                golden = data.non_tensor_batch["reward_model"][i]["ground_truth"]
                print(f"[{source}] score {row['score']:g}, golden {golden}\n{row['text']}\n")
