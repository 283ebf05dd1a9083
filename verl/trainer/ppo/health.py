"""Says early, and in plain words, that a run is going wrong: one line per sign, from its steps' metrics.

    step, metrics --HealthMonitor.check--> ["the entropy is 0.004 nats per token: ...", ...]

A sign must be seen several steps in a row, and is not repeated for `QUIET_STEPS`. Several signs compare with
the run's first `EARLY_STEPS`. A metric that a run does not have is not looked at. The limits below are wide
of what runs that learn show: a line is worth reading, and no line proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

EARLY_STEPS = 5  # what "at the start" is the mean of
QUIET_STEPS = 50  # steps before the same sign is told again

ENTROPY_FLOOR = 0.02  # nats per token; runs that learned the microworld to 0.9 went down to 0.04
ENTROPY_FALL = 0.1  # of the entropy at the start, while the score has not risen
ENTROPY_RISE = 3.0  # times the entropy at the start
STRANGE_TEXT = 2.0  # times the entropy at the start, plus STRANGE_FLOOR: nats per token under the reference
STRANGE_FLOOR = 0.3  # for references that are all but deterministic
STEP_KL = 0.1  # nats per token between the policies before and after the updates of a step
CLIPPED_SHARE = 0.3  # of tokens whose gradient the clip takes; a few per cent are usual
RATIO_EXTREME = 100.0  # new to old probability of some token, or old to new
EFFECTIVE_GROUPS = 0.2  # share of groups with an advantage other than 0
MISMATCH_KL = 0.02  # nats per token, rollout engine to trainer; bfloat16 alone stays below 0.001
REPEATED_NGRAMS = 0.3  # share of n-grams that stood in the same trajectory before
SHORT_RESPONSES = 0.25  # of the response length at the start
CUT_RESPONSES = 0.5  # share of trajectories that ran into the longest response


@dataclass(frozen=True)
class _Seen:
    """The metrics of a step, and their means over the first steps (None while there are too few)."""

    now: Mapping[str, float]
    early: Mapping[str, float]

    def value(self, *names: str) -> float | None:
        """The first of these metrics that there is."""
        return next((float(self.now[name]) for name in names if name in self.now), None)

    def both(self, name: str) -> tuple[float, float] | None:
        """(now, at the start)"""
        if name not in self.now or name not in self.early:
            return None
        return float(self.now[name]), self.early[name]


def _entropy_gone(seen: _Seen) -> str | None:
    entropy = seen.value("actor/entropy")
    if entropy is None or entropy >= ENTROPY_FLOOR:
        return None
    return (
        f"the entropy is {entropy:.2g} nats per token: the policy hardly tries anything else any more, and "
        "what it has not found by now it won't find. " + _MORE_ENTROPY
    )


def _entropy_falls(seen: _Seen) -> str | None:
    entropy, score = seen.both("actor/entropy"), seen.both("critic/score/mean")
    if entropy is None or score is None or entropy[0] >= ENTROPY_FALL * entropy[1] or score[0] > score[1]:
        return None
    return (
        f"the entropy fell from {entropy[1]:.2g} to {entropy[0]:.2g} nats per token and the score did not "
        f"rise ({score[1]:.3g} at the start, now {score[0]:.3g}): the policy settles on something that does "
        "not pay. " + _MORE_ENTROPY
    )


_MORE_ENTROPY = (
    "Try actor.entropy_ctrl.target_entropy, a larger actor.entropy_coeff or actor.clip_ratio_high, or a "
    "smaller learning rate."
)


def _entropy_rises(seen: _Seen) -> str | None:
    entropy = seen.both("actor/entropy")
    if entropy is None or entropy[0] <= ENTROPY_RISE * entropy[1]:
        return None
    return (
        f"the entropy rose from {entropy[1]:.2g} to {entropy[0]:.2g} nats per token: the policy falls apart "
        "into random text. Try a smaller learning rate or actor.entropy_coeff, or a KL to the reference."
    )


def _far_from_reference(seen: _Seen) -> str | None:
    """Compares what the policy's text costs the reference, entropy + KL, with what its own text cost it: a
    KL alone means little, as a policy that has only become surer of itself has a large one too.
    """
    kl, entropy = seen.value("actor/ref_kl", "critic/kl"), seen.both("actor/entropy")
    if kl is None or entropy is None or _entropy_rises(seen):
        return None
    if kl + entropy[0] <= STRANGE_TEXT * entropy[1] + STRANGE_FLOOR:
        return None
    return (
        f"to the reference a token of the policy is worth {kl + entropy[0]:.2g} nats, one of its own "
        f"{entropy[1]:.2g}: the policy writes what the model that it came from never would, often to "
        "exploit the reward. Read some trajectories; try a larger KL coefficient or a smaller learning rate."
    )


def _step_too_large(seen: _Seen) -> str | None:
    kl, clipped = seen.value("actor/ppo_kl"), seen.value("actor/pg_clipfrac")
    if kl is not None and abs(kl) > STEP_KL:
        what = f"the policy moves by {abs(kl):.2g} nats per token within one step"
    elif clipped is not None and clipped > CLIPPED_SHARE:
        what = f"the clip takes the gradient of {clipped:.0%} of the tokens"
    else:
        return None
    return f"{what}: its updates are too large. Try a smaller learning rate, or fewer mini-batches or epochs."


def _ratio_extreme(seen: _Seen) -> str | None:
    highest, lowest = seen.value("actor/ratio/max"), seen.value("actor/ratio/min")
    if highest is not None and highest > RATIO_EXTREME:
        ratio = highest
    elif lowest is not None and lowest < 1 / RATIO_EXTREME:
        ratio = lowest
    else:
        return None
    return (
        f"some token's probability changed by a factor of {ratio:.2g} within one step: single tokens drive "
        "the update. Try a smaller learning rate or grad_clip, or actor.clip_ratio_c=3 (dual clip)."
    )


def _few_groups_teach(seen: _Seen) -> str | None:
    share, score = seen.value("groups/effective_share"), seen.value("critic/score/mean")
    if share is None or share >= EFFECTIVE_GROUPS:
        return None
    return (
        f"only {share:.0%} of the groups have answers of different worth (mean score "
        f"{'unknown' if score is None else f'{score:.3g}'}): the others teach nothing. Try questions that "
        "are harder (if the score is high) or easier (if it is low), or more answers to each "
        "(rollout.n_agent)."
    )


def _mismatch(seen: _Seen) -> str | None:
    kl = seen.value("rollout_corr/k3_kl")
    if kl is None or kl <= MISMATCH_KL:
        return None
    return (
        f"rollout engine and trainer differ by a KL of {kl:.2g} nats per token: the policy learns from "
        "tokens that it would not have sampled. Check that the engine has the same weights, precision and "
        "sampling (top_p, top_k); try algorithm.rollout_correction.rollout_is=token."
    )


def _repeats_itself(seen: _Seen) -> str | None:
    share = seen.value("response/repeated_ngrams")
    if share is None or share <= REPEATED_NGRAMS:
        return None
    return (
        f"{share:.0%} of what the policy writes it has written before in the same trajectory: it runs in "
        "circles. Read some trajectories; try a smaller learning rate or a KL to the reference."
    )


def _length(seen: _Seen) -> str | None:
    length, cut = seen.both("response_length/mean"), seen.value("response_length/clip_ratio")
    if length is not None and length[0] < SHORT_RESPONSES * length[1]:
        return (
            f"responses shrank from {length[1]:.0f} to {length[0]:.0f} tokens: the policy skips reasoning or "
            "searching. Read some trajectories; check what the reward pays for."
        )
    if cut is not None and cut > CUT_RESPONSES:
        return (
            f"{cut:.0%} of the trajectories run into their longest length and end without an answer. Try a "
            "larger data.max_prompt_length, or check whether the policy still ends its answers."
        )
    return None


# sign -> (what looks for it, steps in a row before it is told)
_SIGNS: dict[str, tuple[Callable[[_Seen], str | None], int]] = {
    "entropy_gone": (_entropy_gone, 3),
    "entropy_falls": (_entropy_falls, 3),
    "entropy_rises": (_entropy_rises, 3),
    "far_from_reference": (_far_from_reference, 3),
    "step_too_large": (_step_too_large, 3),
    "ratio_extreme": (_ratio_extreme, 3),
    "few_groups_teach": (_few_groups_teach, 5),
    "mismatch": (_mismatch, 1),
    "repeats_itself": (_repeats_itself, 3),
    "length": (_length, 3),
}
_COMPARED = ("actor/entropy", "critic/score/mean", "response_length/mean")


class HealthMonitor:
    """Watches one run. Its state goes into checkpoints: "at the start" means the run's, not the restart's."""

    def __init__(self) -> None:
        self._early: dict[str, list[float]] = {name: [] for name in _COMPARED}
        self._in_a_row = dict.fromkeys(_SIGNS, 0)
        self._last_told: dict[str, int] = {}

    def check(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        """The lines to show after this step; most often none.

        Args:
            step: counts from 1. metrics: all metrics of the step.
        """
        early = {
            name: sum(values) / len(values)
            for name, values in self._early.items()
            if len(values) == EARLY_STEPS
        }
        for name, values in self._early.items():
            if name in metrics and len(values) < EARLY_STEPS:
                values.append(float(metrics[name]))
        seen, lines = _Seen(metrics, early), []
        for sign, (look, patience) in _SIGNS.items():
            line = look(seen)
            self._in_a_row[sign] = 0 if line is None else self._in_a_row[sign] + 1
            quiet = sign in self._last_told and step - self._last_told[sign] < QUIET_STEPS
            if line is not None and self._in_a_row[sign] >= patience and not quiet:
                self._last_told[sign] = step
                lines.append(line)
        return lines

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and lists, for `run_state.json`."""
        return {
            "early": {name: list(values) for name, values in self._early.items()},
            "in_a_row": dict(self._in_a_row),
            "last_told": dict(self._last_told),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._early |= {name: list(values) for name, values in state["early"].items() if name in _COMPARED}
        self._in_a_row |= {sign: count for sign, count in state["in_a_row"].items() if sign in _SIGNS}
        self._last_told = dict(state["last_told"])
