"""The keys of `prompt_selection`: which prompts a step asks, and what the keys mean for one another.

    filter_groups       a group whose answers are all worth the same is left out, and another prompt is asked
    retire_solved       a prompt that is solved is not asked again
    difficulty_pools    prompts that are too easy or too hard are asked less often

`verl/trainer/ppo/prompt_selector.py` reads them for each step, `prompt_sampler` of `verl/data/mixture.py` for
the order of the prompts. docs/prompts.md is their page.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl.config.keys import Block, Share, Whole, config_block, config_error, group, key
from verl.config.policy import ROLLOUT

if TYPE_CHECKING:
    from verl.config.schema import Config

SELECTION = "prompt_selection"
FILTER = f"{SELECTION}.filter_groups"
RETIRE = f"{SELECTION}.retire_solved"
POOLS = f"{SELECTION}.difficulty_pools"


@config_block
class FilterGroups(Block):
    """The filter of groups that teach nothing: DAPO's dynamic sampling, under verl's names."""

    enable: bool = key(False, "leave out prompts whose trajectories all have the same reward (DAPO)")
    metric: str | None = key(None, "must differ: seq_reward, acc (exact match), or the reward function's")
    max_num_gen_batches: Whole = key(10, "most rounds of generation in a step (1: train fewer; 0: no limit)")

    @property
    def refill(self) -> bool:
        """Return whether a step that lacks groups asks more prompts."""
        return self.max_num_gen_batches != 1


@config_block
class PoolsConfig(Block):
    """The pools of easy, normal and hard prompts, and how many of a step's prompts come from each."""

    enable: bool = key(False, "draw a step's prompts by the mean score of their group when last asked")
    easy_threshold: float = key(1.0, "a prompt is easy if its group had at least this mean score")
    hard_threshold: float = key(0.0, "a prompt is hard if its group had at most this mean score")
    easy_share: Share = key(0.1, "share of a step's prompts that are easy ones")
    hard_share: Share = key(0.1, "the same, of hard ones; the rest lies between or is not yet measured")


@config_block
class PromptSelection(Block):
    """The choice of the prompts that a step asks."""

    filter_groups: FilterGroups = group(FilterGroups)
    retire_solved: Share | None = key(
        None, "with this mean score (thrift: and no search to save) a prompt is not asked again"
    )
    difficulty_pools: PoolsConfig = group(PoolsConfig)


def check_prompt_selection(config: Config, compares_group: bool | None = None) -> None:
    """Check what the keys of `prompt_selection` mean for one another, and for the rest of the run.

    Args:
        config: the whole configuration.
        compares_group: whether the estimator compares the answers to one question. None: unknown.

    Raises:
        ValueError: there is a mistake.
    """
    _check_filter(config, compares_group)
    _check_pools(config)


def _check_filter(config: Config, compares_group: bool | None) -> None:
    groups = config.prompt_selection.filter_groups
    rollout = config.actor_rollout_ref.rollout
    if not groups.enable:
        if groups.metric is not None:
            raise config_error(config, f"{FILTER}.metric", f" without {FILTER}.enable=true; expected both.")
        return
    if compares_group is False:
        reason = (
            ", which does not compare the answers to one question: groups with equal rewards teach it as "
            "much as others; expected enable=false, or an estimator such as grpo."
        )
        raise config_error(config, f"{FILTER}.enable algorithm.adv_estimator", reason)
    if rollout.n * rollout.n_agent < 2:
        reason = f" and one trajectory a prompt; expected a group. Set {ROLLOUT}.n_agent, for example to 5."
        raise config_error(config, f"{FILTER}.enable", reason)
    if groups.metric == "seq_final_reward":
        reason = (
            ", the reward with the KL in it, which is not known when groups are chosen; expected seq_reward, "
            "acc, or a number that the reward function returns."
        )
        raise config_error(config, f"{FILTER}.metric", reason)


def _check_pools(config: Config) -> None:
    pools = config.prompt_selection.difficulty_pools
    retire = config.prompt_selection.retire_solved
    if pools.easy_share + pools.hard_share > 1:
        keys = f"{POOLS}.easy_share {POOLS}.hard_share"
        raise config_error(config, keys, "; expected at most 1 together.")
    if pools.hard_threshold >= pools.easy_threshold:
        keys = f"{POOLS}.hard_threshold {POOLS}.easy_threshold"
        raise config_error(config, keys, "; expected the first to be smaller: no prompt is both.")
    if not pools.enable:
        return
    if config.data.streaming:
        expected = ", which ask for rows at any place; expected one or the other."
        raise config_error(config, f"data.streaming {POOLS}.enable", expected)
    if retire is not None and retire <= pools.hard_threshold:
        reason = ", so that hard prompts would count as solved; expected retire_solved above hard_threshold."
        raise config_error(config, f"{RETIRE} {POOLS}.hard_threshold", reason)


def unread_selection_keys(config: Config) -> dict[str, str]:
    """Return the keys of `prompt_selection` that nothing reads, and the reason of each."""
    selection = config.prompt_selection
    pools = selection.difficulty_pools
    unread: dict[str, str] = {}
    if not selection.filter_groups.enable:
        unread[f"{FILTER}.max_num_gen_batches"] = f"no group is left out. Set {FILTER}.enable=true."
    if not pools.enable:
        reason = f"prompts are asked in the order of the epochs. Set {POOLS}.enable=true."
        names = ("easy_threshold", "hard_threshold", "easy_share", "hard_share")
        unread |= {f"{POOLS}.{name}": reason for name in names}
    # With thrift a solved prompt stays while its right answers differ in searches, and then it is easy.
    retire = selection.retire_solved
    retires_all = retire is not None and retire <= pools.easy_threshold and config.algorithm.thrift == 0
    if pools.enable and retires_all:
        unread[f"{POOLS}.easy_share"] = f"each easy prompt is retired. Set {RETIRE}=null."
    return unread
