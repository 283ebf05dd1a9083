"""Which policy loss reads which setting of the actor block, and which aggregation a loss is meant for."""

from collections.abc import Iterator

from omegaconf import DictConfig

from verl.trainer.config.keys import ACTOR

_WITH_CLIP_RANGE = ("vanilla", "gspo", "geo_mean", "cispo", "dppo_tv", "dppo_kl", "clip_cov")

# key of the actor block -> the loss modes that read it; every loss reads the others
READ_BY: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("clip_ratio", "clip_ratio_low", "clip_ratio_high"), _WITH_CLIP_RANGE),
    "clip_ratio_c": ("vanilla", "dppo_tv", "dppo_kl"),
    "tau_pos": ("sapo",),
    "tau_neg": ("sapo",),
    "policy_loss.clip_cov_ratio": ("clip_cov",),
    "policy_loss.clip_cov_lb": ("clip_cov",),
    "policy_loss.clip_cov_ub": ("clip_cov",),
    "policy_loss.kl_cov_ratio": ("kl_cov",),
    "policy_loss.ppo_kl_coef": ("kl_cov",),
    "policy_loss.aipo_max_ratio": ("aipo",),
    "policy_loss.ipo_eps": ("ipo",),
    "policy_loss.ipo_kl_tau": ("ipo",),
    "policy_loss.dro_beta": ("dro",),
}
# loss mode -> the aggregation of its paper, where it is part of the method
MEANT_FOR: dict[str, str] = {
    "gspo": "seq-mean-token-mean",
    "geo_mean": "seq-mean-token-mean",
    "sapo": "seq-mean-token-mean",
    "dro": "seq-mean-token-sum",
}


def unread_settings(config: DictConfig) -> dict[str, str]:
    """key -> why it changes nothing with the chosen loss and aggregation. A loss of the user's own may read
    any of them.
    """
    actor = config.actor_rollout_ref.actor
    unread = {}
    if ":" not in actor.policy_loss.loss_mode:
        unread = {
            f"{ACTOR}.{key}": f"it is for loss_mode {' | '.join(modes)}, not {actor.policy_loss.loss_mode}."
            for key, modes in READ_BY.items()
            if actor.policy_loss.loss_mode not in modes
        }
    if actor.loss_agg_mode != "seq-mean-token-sum-norm":
        unread[f"{ACTOR}.loss_scale_factor"] = "it is for loss_agg_mode seq-mean-token-sum-norm."
    return unread


def unusual_aggregation(config: DictConfig) -> Iterator[str]:
    """A line, if the chosen loss is meant for another aggregation than the chosen one."""
    actor = config.actor_rollout_ref.actor
    mode = actor.policy_loss.loss_mode
    meant_for = MEANT_FOR.get(mode, actor.loss_agg_mode)
    if meant_for != actor.loss_agg_mode:
        yield (
            f"{ACTOR}.policy_loss.loss_mode={mode} is meant for {ACTOR}.loss_agg_mode={meant_for}; with "
            f"{actor.loss_agg_mode} its rows have other weights than in the paper."
        )
