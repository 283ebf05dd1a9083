"""Checks of what a run writes: its folder, checkpoints, the home folder."""

from __future__ import annotations

from collections.abc import Iterator

from verl.doctor import needs
from verl.doctor.facts import Facts, Machine, Model, Run
from verl.doctor.facts_run import SFT
from verl.doctor.findings import Finding, error, warning
from verl.doctor.registry import check, check_each

HOME_BYTES = 1e9
FULL = 0.95  # Ray refuses to spill to a file system that is fuller


@check_each("writable", needs.places)
def find_places_that_can_not_be_written(facts: Facts, machine: Machine) -> Iterator[Finding]:
    """folders of the run that are full, over quota, read-only or not the user's"""
    keys = {
        "run folder": (
            "nothing of the run could be kept",
            "trainer.default_local_dir=<folder on a file system with room>",
        ),
        "Ray's files": (
            "Ray would not start",
            "export RAY_TMPDIR=<folder on a local disk with a short path>",
        ),
        "models from the hub": (
            "the model could not be fetched",
            "export HF_HOME=<folder on a file system with room>",
        ),
    }
    if not any(model.where == "hub" for model in facts.models):
        del keys["models from the hub"]  # all are there: a cache that is only read is as good
    for place in machine.places:
        if place.used_for in keys and place.problem is not None:
            why, do = keys[place.used_for]
            yield error(f"{place.used_for}: {place.path} can't be written ({place.problem})", why, do)


@check_each("home")
def find_full_home(facts: Facts, machine: Machine) -> Iterator[Finding]:
    """a home folder that is full or over quota"""
    home = machine.place("home")
    if home is None or home.free_bytes is None:
        return
    if home.problem is None and home.free_bytes >= HOME_BYTES:
        return
    reason = (
        f"can't be written ({home.problem})" if home.problem else f"has {home.free_bytes / 1e6:.0f} MB left"
    )
    yield warning(
        f"the home folder {reason}",
        "models from the hub, wandb, compiled kernels and logins are kept there, and fail in the middle of "
        "a run",
        "export HF_HOME=/<disk>/hf XDG_CACHE_HOME=/<disk>/cache WANDB_CACHE_DIR=/<disk>/wandb "
        "TRITON_CACHE_DIR=/<disk>/triton, or make room: du -xsh ~/.cache/*",
    )


@check_each("ray-disk", needs.ray_place)
def find_full_ray_disk(facts: Facts, machine: Machine) -> Iterator[Finding]:
    """the disk of Ray's files more than 95 % full"""
    place = machine.place("Ray's files")
    if place is None or place.problem is not None or not place.total_bytes or place.free_bytes is None:
        return
    used = 1 - place.free_bytes / place.total_bytes
    if used > FULL:
        yield warning(
            f"{place.path}, where Ray keeps its files, is {100 * used:.0f} % full",
            f"above {100 * FULL:.0f} % Ray refuses to move objects to disk, and tasks fail",
            "export RAY_TMPDIR=<folder on a local disk with room>",
        )


@check("checkpoints", needs.a_run)
def find_no_room_for_checkpoints(facts: Facts) -> Iterator[Finding]:
    """a file system too small for the checkpoints that the run keeps"""
    run, place = facts.run, facts.here.place("run folder")
    if run is None or place is None or place.problem is not None or place.free_bytes is None:
        return
    if run.get("trainer.val_only"):
        return
    size = checkpoint_bytes(run, facts.models)
    if size is None:
        return
    kept, at_once = checkpoints_at_once(run)
    needed = max(1, at_once - facts.checkpoints_there) * size
    if needed > place.free_bytes:
        there = f", {facts.checkpoints_there} are there" if facts.checkpoints_there else ""
        yield error(
            f"{place.path} has {_gb(place.free_bytes)} free, {at_once} checkpoints of about {_gb(size)} need "
            f"{_gb(at_once * size)} (trainer.max_ckpt_to_keep={run['trainer.max_ckpt_to_keep']}, and one "
            "being "
            f"written{there})",
            "the run would end when the disk is full, hours from now",
            f"trainer.max_ckpt_to_keep={max(1, int(place.free_bytes // size) - 1)}"
            if place.free_bytes >= 2 * size and kept > 1
            else "trainer.default_local_dir=<folder on a file system with room>",
        )


def checkpoints_at_once(run: Run) -> tuple[int, int]:
    """(checkpoints that stay, those on disk while the next one is written before the oldest goes)."""
    steps, frequency = run["trainer.total_training_steps"], run["trainer.save_freq"]
    kept = run["trainer.max_ckpt_to_keep"]
    if frequency <= 0:
        return 1, 1
    if steps is None:
        return (kept or 1), (kept or 1) + 1
    written = -(-steps // frequency)
    stay = min(kept or written, written)
    return stay, min(stay + 1, written)


def checkpoint_bytes(run: Run, models: tuple[Model, ...]) -> float | None:
    """About what one checkpoint takes: per trained parameter the weight, AdamW's two averages, and the weight
    again in a Hugging Face folder. None where the parameters are not known."""
    params = {model.key: model.num_params for model in models}
    blocks = [("model", "optim", "model.partial_pretrain")]
    if run.program != SFT:
        policy = ("actor_rollout_ref.model", "actor_rollout_ref.actor", "actor_rollout_ref.model.path")
        blocks = [policy]
        if run["algorithm.adv_estimator"] == "gae":
            blocks.append(("critic.model", "critic", "critic.model.path"))
    total = 0.0
    for model_block, _, key in blocks:
        count = params.get(key) or params.get(blocks[0][2])
        if count is None:
            return None
        is_critic = model_block == "critic.model"
        width = 2 if run.get(_dtype_key(run, is_critic), "fp32") == "bf16" else 4
        trained = 0 if run[f"{model_block}.lora_rank"] > 0 else 3 * width
        folder = 0 if is_critic else width
        total += count * (trained + folder)
    return total


def _dtype_key(run: Run, is_critic: bool) -> str:
    if run.program == SFT:
        return "model.fsdp_config.model_dtype"
    return (
        "critic.model.fsdp_config.model_dtype"
        if is_critic
        else "actor_rollout_ref.actor.fsdp_config.model_dtype"
    )


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"
