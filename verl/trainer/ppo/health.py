"""A monitor that says early, and in plain words, that a run is going wrong.

It makes one line for each sign, from the metrics of the steps:

    step, metrics --HealthMonitor.check--> [HealthFinding("entropy_gone", "the entropy ...", 31), ...]

`signs` reads the metrics of one step; several signs compare them with those of the run's first `EARLY_STEPS`.
A sign must be seen several steps in a row, and is not repeated for `QUIET_STEPS`. The limits are far from
what runs that learn show: a line is worth reading, while the absence of lines proves nothing. A metric that a
run does not have is not looked at.

A collapse is a figure that leaves the best level which the run itself has had (`drifts`):

    no_answers            fewer trajectories end with an answer: by more than 0.1, and by 0.35 beyond that
                          when added up over the steps
    falls_apart           the entropy is at more than twice its lowest level (0.5 to 1 nat above it), by 6
                          such distances when added up
    searches_fall:<kind>  a kind of question gets 0.25 searches less, by 1.2 beyond that when added up, while
                          its solve rate falls as well
    kind_lost:<kind>      the solve rate of a kind is below about half of its best, by more than chance
    all_lost              the same over all kinds together, each compared with its own best

One bad step counts for a quarter of a limit, so that no collapse is found before its fourth step. The limits
grow where steps have few rows. They tolerate dips from which healthy runs of the microworld recover by
themselves within six steps: an answer in 68 % of the trajectories for a step or 78 to 88 % for four, or 2
nats more entropy for three steps. They also tolerate 1-hop questions that lose a second search which they do
not need. A kind that is lost for eight steps is reported, even if the run finds it again later.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from verl.checkpoints.run_state import RunStopped
from verl.trainer.ppo.drifts import Drift, Level, halved_evidence
from verl.trainer.ppo.kinds import by_kind, kind_words

EARLY_STEPS = 5  # first steps of a run, whose mean is what it was "at the start"
QUIET_STEPS = 50  # steps before the same sign is reported again
# Steps in a row before a sign is reported; 3 for signs that are not here. A strong rise of the entropy is
# reported as a collapse before that.
PATIENCE = {"few_groups_teach": 5, "mismatch": 1, "entropy_rises": 5}
_ANSWERED = ("train/answered", "env/finish_ratio")  # logs without the first have the second
_ROWS_UNKNOWN = 32.0  # rows of a step whose metrics do not say how many there are
_BY_DIFFICULTY = {"filter/retired", "pools/measured"}  # with these, solved questions are asked less often
_LOST_LIMIT = 10.0  # nats, for solve rates alone: reached by chance once in exp(10) steps of a kind
_LOST_WITH_SEARCHES = 2.3  # nats, for the solve rate of a kind that is also searched for less: ten to one
_LEAST_SOLVED = 0.01  # a kind that was never solved more often than this cannot be lost
_SEARCHES_DEVIATION = 0.7  # standard deviation of the number of searches among questions of a kind
_MOST_KINDS = 64  # kinds that are watched in one run: those that come first
_COMPARED = ("actor/entropy", "critic/score/mean", "response_length/mean")
_MORE_ENTROPY = (
    "Try actor.entropy_ctrl.target_entropy, a larger actor.entropy_coeff or actor.clip_ratio_high, or a "
    "smaller learning rate."
)


def signs(metrics: Mapping[str, float], early: Mapping[str, float]) -> dict[str, str]:
    """Return the line of each sign that a step shows, by the name of the sign.

    A metric that is missing is NaN, which compares false with every limit.

    Args:
        metrics: metrics of the step.
        early: means over the first steps, once they are over.
    """
    return {
        **_entropy_signs(metrics, early),
        **_update_signs(metrics),
        **_teaching_signs(metrics),
        **_text_signs(metrics, early),
    }


def _figure(metrics: Mapping[str, float], *names: str) -> float:
    """Return the first of these metrics that there is, or NaN."""
    for name in names:
        if name in metrics:
            return float(metrics[name])
    return math.nan


def _entropy_signs(metrics: Mapping[str, float], early: Mapping[str, float]) -> dict[str, str]:
    """Return the signs of a policy that is too sure of itself, too random, or far from its reference."""
    seen: dict[str, str] = {}
    entropy = _figure(metrics, "actor/entropy")
    entropy_first = _figure(early, "actor/entropy")
    score = _figure(metrics, "critic/score/mean")
    score_first = _figure(early, "critic/score/mean")
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
    # What the policy's text costs the reference is entropy + KL. The KL alone means little: it is also large
    # for a policy that has only become surer of itself.
    cost = _figure(metrics, "actor/ref_kl", "critic/kl") + entropy
    if cost > 2 * entropy_first + 0.3 and "entropy_rises" not in seen:
        seen["far_from_reference"] = (
            f"to the reference a token of the policy is worth {cost:.2g} nats, one of its own "
            f"{entropy_first:.2g}: the policy writes what the model that it came from never would, often to "
            "exploit the reward. Read some trajectories; try a larger KL coefficient or a smaller learning "
            "rate."
        )
    return seen


def _update_signs(metrics: Mapping[str, float]) -> dict[str, str]:
    """Return the signs of updates that change the policy too much."""
    seen: dict[str, str] = {}
    moved = abs(_figure(metrics, "actor/ppo_kl"))
    clipped = _figure(metrics, "actor/pg_clipfrac")
    if moved > 0.1 or clipped > 0.3:  # nats per token; of all tokens, where a few per cent are usual
        symptom = (
            f"the policy moves by {moved:.2g} nats per token within one step"
            if moved > 0.1
            else f"the clip takes the gradient of {clipped:.0%} of the tokens"
        )
        seen["step_too_large"] = (
            f"{symptom}: its updates are too large. Try a smaller learning rate, or fewer mini-batches or "
            "epochs."
        )
    highest = _figure(metrics, "actor/ratio/max")
    lowest = _figure(metrics, "actor/ratio/min")
    if highest > 100 or lowest < 0.01:
        factor = highest if highest > 100 else lowest
        seen["ratio_extreme"] = (
            f"some token's probability changed by a factor of {factor:.2g} "
            "within one step: single tokens drive the update. Try a smaller learning rate or grad_clip, or "
            "actor.clip_ratio_c=3 (dual clip)."
        )
    return seen


def _teaching_signs(metrics: Mapping[str, float]) -> dict[str, str]:
    """Return the signs of samples that teach nothing, or teach something else than they should."""
    seen: dict[str, str] = {}
    score = _figure(metrics, "critic/score/mean")
    share = _figure(metrics, "groups/effective_share")
    if share < 0.2:
        seen["few_groups_teach"] = (
            f"only {share:.0%} of the groups have answers of different worth (mean score {score:.3g}): the "
            "others teach nothing. Try questions that are harder (if the score is high) or easier (if it is "
            "low), or more answers to each (rollout.n_agent)."
        )
    mismatch = _figure(metrics, "rollout_corr/k3_kl")
    if mismatch > 0.02:  # nats per token; bfloat16 alone stays below 0.001
        seen["mismatch"] = (
            f"rollout engine and trainer differ by a KL of {mismatch:.2g} nats per token: the policy learns "
            "from tokens that it would not have sampled. Check that the engine has the same weights, "
            "precision and sampling (top_p, top_k); try algorithm.rollout_correction.rollout_is=token."
        )
    return seen


def _text_signs(metrics: Mapping[str, float], early: Mapping[str, float]) -> dict[str, str]:
    """Return the signs of responses that go in circles, shrink or are cut."""
    seen: dict[str, str] = {}
    repeated = _figure(metrics, "response/repeated_ngrams")
    if repeated > 0.3:
        seen["repeats_itself"] = (
            f"{repeated:.0%} of what the policy writes it has written before in the same trajectory: it runs "
            "in circles. Read some trajectories; try a smaller learning rate or a KL to the reference."
        )
    length = _figure(metrics, "response_length/mean")
    cut = _figure(metrics, "response_length/clip_ratio")
    length_first = _figure(early, "response_length/mean")
    if length < 0.25 * length_first:
        seen["length"] = (
            f"responses shrank from {length_first:.0f} to {length:.0f} tokens: the policy skips reasoning or "
            "searching. Read some trajectories; check what the reward pays for."
        )
    elif cut > 0.5:
        seen["length"] = (
            f"{cut:.0%} of the trajectories are cut: a last turn at data.max_response_length, or all of "
            "it at data.max_prompt_length. Try a larger one; check whether the policy still ends its turns."
        )
    return seen


@dataclass(frozen=True)
class HealthFinding:
    """A sign that a run shows.

    Attributes:
        name: name of the sign; for a kind of question it ends with ":" and the kind.
        line: the line for the user.
        onset: the step at which the sign began; for a collapse, the one at which the figure left its own
            level.
        is_collapse: whether the run has lost what it could do. A checkpoint from before `onset` still has it.
    """

    name: str
    line: str
    onset: int
    is_collapse: bool


class HealthMonitor:
    """A monitor of one run.

    Its state goes into checkpoints: "at the start" means the start of the run, not that of a restart.
    """

    def __init__(self) -> None:
        self._early: dict[str, list[float]] = {name: [] for name in _COMPARED}
        self._in_a_row: dict[str, int] = {}
        self._last_told: dict[str, int] = {}
        self._levels: dict[str, Level] = {}  # figure -> its level
        self._drifts: dict[str, Drift] = {}  # figure -> its drift
        self._open: dict[str, HealthFinding] = {}  # collapses from which the run has not recovered
        self._kinds: dict[str, dict[str, dict[str, float]]] = {}  # see `training_figures`

    def check(self, step: int, metrics: Mapping[str, float]) -> list[HealthFinding]:
        """Return the findings to report after this step; most often there are none."""
        full = {name: values for name, values in self._early.items() if len(values) == EARLY_STEPS}
        seen = signs(metrics, {name: sum(values) / len(values) for name, values in full.items()})
        for name, values in self._early.items():
            if name in metrics and len(values) < EARLY_STEPS:
                values.append(float(metrics[name]))
        self._in_a_row = {sign: self._in_a_row.get(sign, 0) + 1 for sign in seen}
        self._look_for_collapses(step, metrics)
        findings = [finding for name, finding in self._open.items() if not self._is_quiet(name, step)]
        for sign, line in seen.items():
            in_a_row = self._in_a_row[sign]
            is_told = self._is_quiet(sign, step)
            if sign == "entropy_rises" and "falls_apart" in self._open:
                is_told = True
            if in_a_row >= PATIENCE.get(sign, 3) and not is_told:
                findings.append(HealthFinding(sign, line, step - in_a_row + 1, is_collapse=False))
        self._last_told |= {finding.name: step for finding in findings}
        return findings

    def _is_quiet(self, name: str, step: int) -> bool:
        return name in self._last_told and step - self._last_told[name] < QUIET_STEPS

    @property
    def open_collapses(self) -> list[HealthFinding]:
        """Return the collapses from which the run has not recovered, oldest first."""
        return sorted(self._open.values(), key=lambda finding: (finding.onset, finding.name))

    # ------------------------------------------------------------------------- collapses

    def _look_for_collapses(self, step: int, metrics: Mapping[str, float]) -> None:
        """Update levels, drifts and open collapses with the metrics of this step."""
        kinds = {kind: figures for kind, figures in by_kind(metrics).items() if _is_whole(figures)}
        of_kinds = sum(figures["count"] for figures in kinds.values())
        num_rows = metrics.get("train/answered_of", of_kinds or _ROWS_UNKNOWN)
        self._look_at_actions(step, metrics, float(num_rows))
        self._look_at_entropy(step, metrics)
        kinds = {
            kind: figures
            for kind, figures in kinds.items()
            if kind in self._kinds or len(self._kinds) < _MOST_KINDS
        }
        for kind, figures in kinds.items():
            self._note_figures(kind, figures)
        if kinds and _BY_DIFFICULTY.isdisjoint(metrics):  # otherwise solve rates say nothing about the policy
            evidence = self._evidence(kinds)
            for kind, figures in kinds.items():
                self._look_at_kind(step, kind, figures)
            self._look_at_all_kinds(step, kinds, evidence)

    def _look_at_actions(self, step: int, metrics: Mapping[str, float], num_rows: float) -> None:
        name = next((name for name in _ANSWERED if name in metrics), None)
        if name is None or not math.isfinite(metrics[name]):
            return
        answered = float(metrics[name])
        level = self._levels.setdefault("answered", Level())
        drift = self._drifts.setdefault("answered", Drift())
        best = level.best
        if best is not None:
            noise = math.sqrt(best * (1 - best) / num_rows)
            slack = max(0.1, noise)
            limit = max(0.35, 6 * noise)
            drift.add(step, answered < best - slack / 2, best - slack - answered, limit)
            line = (
                f"since step {drift.left} fewer trajectories end with an answer: {answered:.0%} now, "
                f"{best:.0%} at their best. The policy forgets how to act. {_go_back(drift.left)}"
            )
            self._open_or_close("no_answers", drift, limit, line)
        level.add_share(answered, num_rows)
        if drift.total == 0.0:
            level.forget()

    def _look_at_entropy(self, step: int, metrics: Mapping[str, float]) -> None:
        entropy = float(metrics.get("actor/entropy", math.nan))
        if not math.isfinite(entropy):
            return
        # The level is that of the negative entropy, as less entropy is better.
        level = self._levels.setdefault("entropy", Level())
        drift = self._drifts.setdefault("entropy", Drift())
        if level.best is not None:
            lowest = -level.best
            slack = min(max(lowest, 0.5), 1.0)
            limit = 6 * slack
            drift.add(step, entropy > lowest + slack / 2, entropy - lowest - slack, limit)
            line = (
                f"the entropy rose from {lowest:.2g} to {entropy:.2g} nats per token since step "
                f"{drift.left}: the policy falls apart into random text. {_go_back(drift.left)}"
            )
            entropy_coeff = metrics.get("actor/entropy_coeff", 0.0)
            if entropy_coeff > 0:
                line += f" Its bonus pushes the same way: try actor.entropy_coeff=0, not {entropy_coeff:g}."
            self._open_or_close("falls_apart", drift, limit, line)
        level.add_mean(-entropy, 1.0, 0.0)
        if drift.total == 0.0:
            level.forget()

    def _evidence(self, kinds: Mapping[str, Mapping[str, float]]) -> float:
        """Return the sum of `halved_evidence` over the kinds, each compared with its own level."""
        evidence = 0.0
        for kind, figures in kinds.items():
            best = self._levels.get(f"score:{kind}", Level()).best or 0.0
            if best > _LEAST_SOLVED:
                evidence += halved_evidence(_share(figures["score"]), best, figures["questions"])
        return evidence

    def _look_at_all_kinds(
        self, step: int, kinds: Mapping[str, Mapping[str, float]], evidence: float
    ) -> None:
        """Find many small kinds that are lost together.

        `_look_at_kind` reports kinds that are lost by themselves.
        """
        drift = self._drifts.setdefault("all", Drift())
        drift.add(step, evidence > 0, evidence, _LOST_LIMIT)
        if drift.total > 0 and any(":" in name for name in self._open):
            return
        rows = sum(figures["count"] for figures in kinds.values())
        score = sum(figures["score"] * figures["count"] for figures in kinds.values()) / rows
        line = (
            f"since step {drift.left} the policy solves far fewer questions than it did, over all kinds "
            f"(mean score {score:.2g} now). {_go_back(drift.left)}"
        )
        self._open_or_close("all_lost", drift, _LOST_LIMIT, line)

    def _look_at_kind(self, step: int, kind: str, figures: Mapping[str, float]) -> None:
        words = kind_words(kind, self._kinds)
        questions = figures["questions"]
        # Of the measure that has drifted further: its drift, its value now, and its best value.
        lost: tuple[Drift, float, float] | None = None
        for measure in ("em", "score"):
            value = _share(figures[measure])
            level = self._levels.setdefault(f"{measure}:{kind}", Level())
            drift = self._drifts.setdefault(f"{measure}:{kind}", Drift())
            best = level.best or 0.0
            if best > _LEAST_SOLVED:
                evidence = halved_evidence(value, best, questions)
                drift.add(step, value < 0.75 * best, evidence, _LOST_LIMIT)
                if lost is None or drift.total > lost[0].total:
                    lost = (drift, value, best)
            level.add_share(value, questions)
            if drift.total == 0.0:
                level.forget()

        level = self._levels.setdefault(f"searches:{kind}", Level())
        drift = self._drifts.setdefault(f"searches:{kind}", Drift())
        searches = figures["searches"]
        most = level.best or 0.0
        noise = _SEARCHES_DEVIATION / math.sqrt(questions)
        limit = max(1.2, 6 * noise)
        if level.best is not None:
            slack = max(0.25, noise)
            drift.add(step, searches < most - slack / 2, most - slack - searches, limit)
        level.add_mean(searches, questions, _SEARCHES_DEVIATION)
        if drift.total == 0.0:
            level.forget()

        if lost is None:
            return
        loss, value, best = lost
        shares = f"{value:.1%} of them are solved now, {best:.0%} at their best"
        searches_sign = f"searches_fall:{kind}"
        if loss.total >= _LOST_WITH_SEARCHES or searches_sign in self._open:
            line = (
                f"since step {drift.left} the policy searches less for {words} ({searches:.2g} searches a "
                f"question, {most:.2g} before), and {shares}: it has lost the searches that these questions "
                f"need. {_go_back(drift.left)}"
            )
            self._open_or_close(searches_sign, drift, limit, line)
        line = (
            f"{words} were solved and no longer are, since step {loss.left}: {shares}. {_go_back(loss.left)}"
        )
        if searches_sign in self._open and f"kind_lost:{kind}" not in self._open:
            return  # one line says it
        self._open_or_close(f"kind_lost:{kind}", loss, _LOST_LIMIT, line)

    def _open_or_close(self, name: str, drift: Drift, limit: float, line: str) -> None:
        if drift.total >= limit:
            assert drift.left is not None
            self._open[name] = HealthFinding(name, line, drift.left, is_collapse=True)
        elif drift.total == 0.0:
            self._open.pop(name, None)

    def _note_figures(self, kind: str, figures: Mapping[str, float]) -> None:
        """Add a step to the sums from which `training_figures` computes."""
        sums = self._kinds.setdefault(kind, {"first": {"steps": 0.0}, "last": {}})
        weighted = {name: figures[name] * figures["count"] for name in ("em", "score", "searches")}
        weighted |= {"count": figures["count"], "questions": figures["questions"]}
        first = sums["first"]
        if first["steps"] < EARLY_STEPS:
            first["steps"] += 1
            for name, value in weighted.items():
                first[name] = first.get(name, 0.0) + value
        for name, value in weighted.items():
            sums["last"][name] = 0.8 * sums["last"].get(name, 0.0) + value

    # ----------------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the state in plain numbers, strings, lists and dictionaries, for `run_state.json`."""
        return {
            "early": self._early,
            "in_a_row": self._in_a_row,
            "last_told": self._last_told,
            "levels": {name: asdict(level) for name, level in self._levels.items()},
            "drifts": {name: asdict(drift) for name, drift in self._drifts.items()},
            "open": [asdict(finding) for finding in self.open_collapses],
            "kinds": self._kinds,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` returned.

        The state of an older version has no levels, drifts, open collapses and kinds.
        """
        state = copy.deepcopy(dict(state))
        self._early |= {name: list(values) for name, values in state["early"].items()}
        self._in_a_row = state["in_a_row"]
        self._last_told = state["last_told"]
        self._levels = {name: Level(**level) for name, level in state.get("levels", {}).items()}
        self._drifts = {name: Drift(**drift) for name, drift in state.get("drifts", {}).items()}
        self._open = {finding["name"]: HealthFinding(**finding) for finding in state.get("open", [])}
        self._kinds = state.get("kinds", {})


def training_figures(state: Mapping[str, Any], when: str) -> dict[str, dict[str, Any]]:
    """Return the figures of each kind of question in training, in the form of `kind_figures`.

    Args:
        state: `HealthMonitor.state_dict()`; {} before the first step.
        when: "first" for the mean over the first steps that had the kind; "last" for the mean over about its
            last five.
    """
    figures: dict[str, dict[str, Any]] = {}
    for kind, sums in state.get("kinds", {}).items():
        rows = sums[when]["count"]
        figures[kind] = {name: sums[when][name] / rows for name in ("em", "score", "searches")}
        matches = any(sums[moment]["em"] > 0 for moment in ("first", "last"))
        judged_by = "em" if matches else "score"
        figures[kind] |= {"count": sums[when]["questions"], "judged_by": judged_by}
    return figures


def _is_whole(figures: Mapping[str, float]) -> bool:
    """Return whether a kind's figures of a step are all there and finite."""
    names = ("em", "score", "searches", "count", "questions")
    return all(math.isfinite(figures.get(name, math.nan)) for name in names) and figures["questions"] > 0


def _share(value: float) -> float:
    """Return an exact match or a score as a share, limited to the range from 0 to 1."""
    return min(max(value, 0.0), 1.0)


def _go_back(onset: int | None) -> str:
    return (
        f"Go on from a checkpoint from before step {onset} (trainer.resume_mode=from_path), and try a "
        "smaller learning rate or a KL to the reference."
    )


def check_updates(metrics: Mapping[str, float], updates: Mapping[str, Any], step: int, limit: int) -> None:
    """Raise RunStopped if updates of the actor or the critic are skipped again and again.

    Args:
        metrics: metrics of the step.
        updates: model -> meta_info of its update.
        step: number of the step.
        limit: how many skipped updates in a row stop the run.
    """
    for name, update in updates.items():
        count = metrics.get(f"{name}/num_skipped_in_a_row", 0)
        if count >= limit:
            raise RunStopped(
                f"step {step}: {count:g} updates of the {name} in a row were skipped "
                f"(trainer.max_skipped_updates={limit}): {update['skipped_update']}"
            )
