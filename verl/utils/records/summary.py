"""`summary.json`: the result of a run in one small object."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

if TYPE_CHECKING:
    from verl.trainer.ppo.run_state import RunState

MAIN_MODE = "sampled"  # the mode whose figures bear no suffix, if it was measured


def build_summary(config: DictConfig, state: RunState, wall_seconds: float) -> dict[str, Any]:
    """What `summary.json` holds.

    Keys: em_before, em_after, em_after_by_hops, searches_by_hops, num_val_questions (sampled at temperature 1
    if `trainer.val_modes` has that, else the first mode), and the same with the suffix of every further mode,
    `_greedy`. Figures of `data.extra_val_files` have the prefix `extra_`. Then steps, wall_seconds,
    seconds_by_phase, generated_tokens_per_second, trained_tokens_per_second, seed. A figure that was not
    measured is None.
    """
    before, after = (state.validation.get(when) or {} for when in ("before", "after"))
    seconds = state.seconds_by_phase
    summary = _validation_figures(before, after, "")
    if "extra" in before or "extra" in after:
        summary |= _validation_figures(before.get("extra") or {}, after.get("extra") or {}, "extra_")
    return summary | {
        "steps": state.step,
        "wall_seconds": wall_seconds,
        "seconds_by_phase": dict(seconds),
        "generated_tokens_per_second": _rate(state.generated_tokens, seconds.get("gen", 0.0)),
        "trained_tokens_per_second": _rate(
            state.trained_tokens, seconds.get("update_actor", 0.0) + seconds.get("update_critic", 0.0)
        ),
        "seed": config.trainer.seed,
    }


def _validation_figures(before: dict[str, Any], after: dict[str, Any], prefix: str) -> dict[str, Any]:
    modes = [mode for mode in (after or before) if mode != "extra"]
    modes.sort(key=lambda mode: mode != MAIN_MODE)  # stable: the others keep their order
    figures: dict[str, Any] = {}
    for i, mode in enumerate(modes or [MAIN_MODE]):
        first, last = before.get(mode) or {}, after.get(mode) or {}
        suffix = f"_{mode}" if i else ""
        named = {
            "em_before": first.get("em"),
            "em_after": last.get("em"),
            "em_before_by_hops": first.get("em_by_hops"),
            "em_after_by_hops": last.get("em_by_hops"),
            "searches_by_hops": (last or first).get("searches_by_hops"),
            "num_val_questions": (last or first).get("num_questions"),
        }
        figures |= {f"{prefix}{name}{suffix}": value for name, value in named.items()}
    return figures


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if seconds > 0 else None
