"""Checks of the settings alone, and of the settings against the model."""

from __future__ import annotations

from collections.abc import Iterator

from verl.doctor import needs
from verl.doctor.facts import Facts, Run
from verl.doctor.facts_run import SFT
from verl.doctor.findings import Finding, error, warning
from verl.doctor.registry import check
from verl.trainer.config.keys import ACTOR, ROLLOUT


@check("settings", needs.a_run)
def find_mistakes(facts: Facts) -> Iterator[Finding]:
    """what validation refuses: types, ranges, dp x tp x pp against the processes, keys at odds"""
    for mistake in facts.run.mistakes if facts.run else ():
        if mistake.startswith(("Found no file at data.", "Found no folder at")):
            continue  # the checks of files name all of them, not only the first
        what, _, do = mistake.rstrip(".").partition(". ")
        yield error(what, "the run would end before its first step", do or "correct it")


@check("no-effect", needs.a_run)
def find_settings_without_effect(facts: Facts) -> Iterator[Finding]:
    """keys that are set and change nothing, and a loss with an aggregation that it is not meant for"""
    for note in facts.run.notes if facts.run else ():
        what, _, reason = note.rstrip(".").partition(": " if " has no effect: " in note else "; ")
        why, _, do = reason.partition(". ")
        _, is_meant, meant = what.partition(" is meant for ")
        yield warning(what, why, f"set {meant}" if is_meant else do or f"leave {note.partition('=')[0]} out")


@check("batches", needs.a_policy_run)
def find_uneven_batches(facts: Facts) -> Iterator[Finding]:
    """batch sizes that don't divide: mini-batches of a step, processes of a mini-batch"""
    run = facts.run
    if run is None or run.program == SFT or run["trainer.val_only"]:
        return
    rows = run["data.train_batch_size"] * run[f"{ROLLOUT}.n"] * run[f"{ROLLOUT}.n_agent"]
    for block in ("actor_rollout_ref.actor", "critic"):
        if block == "critic" and run["algorithm.adv_estimator"] != "gae":
            continue
        key = f"{block}.ppo_mini_batch_size"
        mini = run[key] * run[f"{ROLLOUT}.n"]
        if mini < rows and rows % mini:
            yield warning(
                f"a step has {rows} trajectories, no multiple of {key}={run[key]}"
                + (f" (times rollout.n: {mini})" if mini != run[key] else ""),
                f"the last update of each step has only {rows % mini} of them and counts as much as the "
                "others",
                f"{key}={_divisor(rows, mini) // run[f'{ROLLOUT}.n']}",
            )
        replicas = num_replicas(run)
        if min(mini, rows) % replicas:
            yield warning(
                f"{key} gives updates of {min(mini, rows)} trajectories for {replicas} replicas of the model",
                f"each update is filled up with {-min(mini, rows) % replicas} copies that are computed and "
                "teach nothing",
                f"set {key} to a multiple of {replicas}",
            )


def num_replicas(run: Run) -> int:
    """Data-parallel replicas of the trained model."""
    shared = run[f"{ACTOR}.ulysses_sequence_parallel_size"]
    if run[f"{ACTOR}.strategy"] == "megatron":
        for size in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
            shared *= run[f"{ACTOR}.megatron.{size}"]
    return max(1, run.num_training_processes // max(1, shared))


def _divisor(number: int, at_most: int) -> int:
    return next(size for size in range(min(at_most, number), 0, -1) if number % size == 0)


@check("lengths", needs.a_policy_run)
def find_lengths_that_do_not_fit(facts: Facts) -> Iterator[Finding]:
    """contexts longer than the model's positions; turns that leave no room for a search"""
    run = facts.run
    if run is None or run.program == SFT:
        return
    data = {key: run[f"data.max_{key}_length"] for key in ("prompt", "response", "start", "obs")}
    longest = data["prompt"] + data["response"]
    for model in facts.models:
        block = model.key.rpartition(".")[0]
        if any("position" in name or "rope" in name for name in run.get(f"{block}.override_config") or {}):
            continue
        if model.max_positions is not None and longest > model.max_positions:
            yield error(
                f"a trajectory may get {longest} tokens (data.max_prompt_length={data['prompt']} and a last "
                "turn of "
                f"max_response_length={data['response']}), {model.key}={model.path} knows "
                f"{model.max_positions}",
                "past its last position a model writes nonsense, or fails",
                f"data.max_prompt_length={max(1, model.max_positions - data['response'])}, or a model with "
                "more "
                "positions (RoPE scaling in its config.json)",
            )
    one_search = data["start"] + data["response"] + data["obs"]
    if run.searches and run["max_turns"] > 0 and one_search > data["prompt"]:
        yield warning(
            f"data.max_start_length={data['start']}, max_response_length={data['response']} and "
            "max_obs_length="
            f"{data['obs']} make {one_search} tokens, data.max_prompt_length is {data['prompt']}",
            "a trajectory may be full before it has read what its first search found",
            f"data.max_prompt_length={one_search + data['response']}, or shorter parts",
        )


@check("wandb-key", needs.a_run)
def find_missing_key(facts: Facts) -> Iterator[Finding]:
    """wandb among the loggers without an API key"""
    run = facts.run
    if run is None or "wandb" not in run["trainer.logger"] or facts.here.environment.get("WANDB_MODE"):
        return
    if not facts.here.has_wandb_key:
        yield warning(
            "trainer.logger has wandb, and there is no WANDB_API_KEY and no `wandb login`",
            "the run is kept on disk only, and nobody sees its curves while it goes",
            "export WANDB_API_KEY=..., or WANDB_MODE=offline to mean it",
        )
