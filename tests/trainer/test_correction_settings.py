"""Settings of KL, entropy and rollout correction that cannot do what they say are refused at the start."""

import copy
import json

import pytest
from omegaconf import OmegaConf

from verl.trainer.config import load_config, validate

ACTOR, CORRECTION = "actor_rollout_ref.actor", "algorithm.rollout_correction"


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A valid configuration of a GRPO run of one process."""
    folder = tmp_path_factory.mktemp("files")
    for name in ("train.parquet", "test.parquet"):
        (folder / name).write_bytes(b"PAR1")
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    return load_config(
        [
            f"data.train_files={folder}/train.parquet",
            f"data.val_files={folder}/test.parquet",
            f"actor_rollout_ref.model.path={folder}",
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.rollout.n_agent=8",
            "data.train_batch_size=32",
        ]
    )


def check(good, overrides):
    config = copy.deepcopy(good)
    for key, value in OmegaConf.from_dotlist(overrides).items():
        OmegaConf.update(config, key, value, merge=True)
    validate(config)


IN_THE_LOSS = [f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_coef=0.01"]
ADAPTIVE = [f"{ACTOR}.entropy_ctrl.type=adaptive", f"{ACTOR}.entropy_ctrl.target_entropy=0.2"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([*IN_THE_LOSS, f"{ACTOR}.kl_loss_type=k1"], "gradient is 0 on average.*expected k2, or k1\\+"),
        ([*IN_THE_LOSS, f"{ACTOR}.kl_loss_type=kl"], "kl_penalty=k1\\) k1 is right"),
        (["algorithm.kl_penalty=k3+"], "expected one of: kl, k1"),  # nothing in a reward has a gradient
        (ADAPTIVE[:1], "without target_entropy.*Set for example"),
        (ADAPTIVE[1:], "with a fixed weight; expected .*type=adaptive"),
        ([*ADAPTIVE, f"{ACTOR}.entropy_coeff=0.5"], "entropy_coeff=0.5, where the adaptive weight starts"),
        ([f"{CORRECTION}.rollout_rs=token"], "rollout_rs_threshold=None; expected both or none"),
        ([f"{CORRECTION}.rollout_rs_threshold=2"], "rollout_rs=None .*expected both or none"),
        ([f"{CORRECTION}.rollout_is_batch_normalize=true"], "without weights; expected"),
        ([f"{CORRECTION}.bypass_mode=true", f"{CORRECTION}.rollout_is=token"], "expected one or the other"),
        ([f"{CORRECTION}.rollout_is=geometric"], "expected one of: token, sequence, null"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(overrides, words, good):
    with pytest.raises(ValueError, match=words):
        check(good, overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        [*IN_THE_LOSS, f"{ACTOR}.kl_loss_type=k1+"],
        [*IN_THE_LOSS, f"{ACTOR}.kl_loss_type=low_var_kl"],
        [f"{ACTOR}.kl_loss_type=kl"],  # as in scripts that have the KL in the reward
        ADAPTIVE,
        [f"{CORRECTION}.rollout_is=sequence", f"{CORRECTION}.rollout_is_batch_normalize=true"],
        [f"{CORRECTION}.rollout_rs=geometric", f"{CORRECTION}.rollout_rs_threshold=1.01"],
        [f"{CORRECTION}.bypass_mode=true"],
    ],
)
def test_a_setting_that_works_is_taken(overrides, good):
    check(good, overrides)
