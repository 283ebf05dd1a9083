"""Says early, and in plain words, that a run is going wrong: one line per sign, from its steps' metrics.

    step, metrics --HealthMonitor.check--> ["the entropy is 0.004 nats per token: ...", ...]

A sign must be seen several steps in a row, and is not repeated for `QUIET_STEPS`. Several signs compare with
the run's first `EARLY_STEPS`. A metric that a run does not have is not looked at. The limits in `signs` are
wide of what runs that learn show: a line is worth reading, and no line proves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from verl.trainer.ppo.run_state import RunStopped

EARLY_STEPS = 5  # what "at the start" is the mean of
QUIET_STEPS = 50  # steps before the same sign is told again
PATIENCE = {"few_groups_teach": 5, "mismatch": 1}  # steps in a row before a sign is told; 3 for the others
_COMPARED = ("actor/entropy", "critic/score/mean", "response_length/mean")
_MORE_ENTROPY = (
    "Try actor.entropy_ctrl.target_entropy, a larger actor.entropy_coeff or actor.clip_ratio_high, or a "
    "smaller learning rate."
)


def signs(metrics: Mapping[str, float], early: Mapping[str, float]) -> dict[str, str]:
    """Name -> line of each sign that a step shows. `early`: means over the first steps, once they are over.

    A metric that is not there is NaN here: it compares false with every limit.
    """

    def now(*names: str) -> float:
        return float(next((metrics[name] for name in names if name in metrics), math.nan))

    seen: dict[str, str] = {}
    entropy, entropy_first = now("actor/entropy"), early.get("actor/entropy", math.nan)
    score, score_first = now("critic/score/mean"), early.get("critic/score/mean", math.nan)
    if entropy < 0.02:  # nats per token; runs that learned the microworld to 0.9 went down to 0.04
        seen["entropy_gone"] = (
            f"the entropy is {entropy:.2g} nats per token: the policy hardly tries anything else any more, "
            f"and what it has not found by now it won't find. {_MORE_ENTROPY}"
        )
    if entropy < 0.1 * entropy_first and score <= score_first:
        seen["entropy_falls"] = (
            f"the entropy fell from {entropy_first:.2g} to {entropy:.2g} nats per token and the score did "
            f"not rise ({score_first:.3g} at the start, now {score:.3g}): the policy settles on something "
            f"that does not pay. {_MORE_ENTROPY}"
        )
    if entropy > 3 * entropy_first:
        seen["entropy_rises"] = (
            f"the entropy rose from {entropy_first:.2g} to {entropy:.2g} nats per token: the policy falls "
            "apart into random text. Try a smaller learning rate or actor.entropy_coeff, or a KL to the "
            "reference."
        )
    # What the policy's text costs the reference is entropy + KL. A KL alone means little: a policy that has
    # only become surer of itself has a large one too.
    cost = now("actor/ref_kl", "critic/kl") + entropy
    if cost > 2 * entropy_first + 0.3 and "entropy_rises" not in seen:
        seen["far_from_reference"] = (
            f"to the reference a token of the policy is worth {cost:.2g} nats, one of its own "
            f"{entropy_first:.2g}: the policy writes what the model that it came from never would, often to "
            "exploit the reward. Read some trajectories; try a larger KL coefficient or a smaller learning "
            "rate."
        )
    moved, clipped = abs(now("actor/ppo_kl")), now("actor/pg_clipfrac")
    if moved > 0.1 or clipped > 0.3:  # nats per token; of all tokens, where a few per cent are usual
        what = (
            f"the policy moves by {moved:.2g} nats per token within one step"
            if moved > 0.1
            else f"the clip takes the gradient of {clipped:.0%} of the tokens"
        )
        seen["step_too_large"] = (
            f"{what}: its updates are too large. Try a smaller learning rate, or fewer mini-batches or "
            "epochs."
        )
    highest, lowest = now("actor/ratio/max"), now("actor/ratio/min")
    if highest > 100 or lowest < 0.01:
        seen["ratio_extreme"] = (
            f"some token's probability changed by a factor of {highest if highest > 100 else lowest:.2g} "
            "within one step: single tokens drive the update. Try a smaller learning rate or grad_clip, or "
            "actor.clip_ratio_c=3 (dual clip)."
        )
    if (share := now("groups/effective_share")) < 0.2:
        seen["few_groups_teach"] = (
            f"only {share:.0%} of the groups have answers of different worth (mean score {score:.3g}): the "
            "others teach nothing. Try questions that are harder (if the score is high) or easier (if it is "
            "low), or more answers to each (rollout.n_agent)."
        )
    if (mismatch := now("rollout_corr/k3_kl")) > 0.02:  # nats per token; bfloat16 alone stays below 0.001
        seen["mismatch"] = (
            f"rollout engine and trainer differ by a KL of {mismatch:.2g} nats per token: the policy learns "
            "from tokens that it would not have sampled. Check that the engine has the same weights, "
            "precision and sampling (top_p, top_k); try algorithm.rollout_correction.rollout_is=token."
        )
    if (repeated := now("response/repeated_ngrams")) > 0.3:
        seen["repeats_itself"] = (
            f"{repeated:.0%} of what the policy writes it has written before in the same trajectory: it runs "
            "in circles. Read some trajectories; try a smaller learning rate or a KL to the reference."
        )
    length, length_first = now("response_length/mean"), early.get("response_length/mean", math.nan)
    if length < 0.25 * length_first:
        seen["length"] = (
            f"responses shrank from {length_first:.0f} to {length:.0f} tokens: the policy skips reasoning or "
            "searching. Read some trajectories; check what the reward pays for."
        )
    elif (cut := now("response_length/clip_ratio")) > 0.5:
        seen["length"] = (
            f"{cut:.0%} of the trajectories are cut: a last turn at data.max_response_length, or all of "
            "it at data.max_prompt_length. Try a larger one; check whether the policy still ends its turns."
        )
    return seen


class HealthMonitor:
    """Watches one run. Its state goes into checkpoints: "at the start" means the run's, not the restart's."""

    def __init__(self) -> None:
        self._early: dict[str, list[float]] = {name: [] for name in _COMPARED}
        self._in_a_row: dict[str, int] = {}
        self._last_told: dict[str, int] = {}

    def check(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        """The lines to show after this step; most often none."""
        full = {name: values for name, values in self._early.items() if len(values) == EARLY_STEPS}
        seen = signs(metrics, {name: sum(values) / len(values) for name, values in full.items()})
        for name, values in self._early.items():
            if name in metrics and len(values) < EARLY_STEPS:
                values.append(float(metrics[name]))
        self._in_a_row = {sign: self._in_a_row.get(sign, 0) + 1 for sign in seen}
        lines = []
        for sign, line in seen.items():
            is_quiet = sign in self._last_told and step - self._last_told[sign] < QUIET_STEPS
            if self._in_a_row[sign] >= PATIENCE.get(sign, 3) and not is_quiet:
                self._last_told[sign] = step
                lines.append(line)
        return lines

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and lists, for `run_state.json`."""
        return {"early": self._early, "in_a_row": self._in_a_row, "last_told": self._last_told}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._early |= {name: list(values) for name, values in state["early"].items()}
        self._in_a_row, self._last_told = dict(state["in_a_row"]), dict(state["last_told"])


def check_updates(metrics: Mapping[str, float], updates: Mapping[str, Any], step: int, limit: int) -> None:
    """RunStopped: updates of the actor or the critic are skipped again and again. updates: what each said."""
    for name, update in updates.items():
        count = metrics.get(f"{name}/num_skipped_in_a_row", 0)
        if count >= limit:
            raise RunStopped(
                f"step {step}: {count:g} updates of the {name} in a row were skipped "
                f"(trainer.max_skipped_updates={limit}): {update['skipped_update']}"
            )
