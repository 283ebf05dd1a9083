"""What the notes at a run's start say of a loss's settings is true."""

import pytest
import torch

from verl.trainer.config import load_config, settings_without_effect
from verl.trainer.config.keys import ACTOR
from verl.trainer.config.limits import CHOICES, IMPORTABLE
from verl.trainer.config.loading import flat
from verl.trainer.config.loss_settings import MEANT_FOR, READ_BY
from verl.trainer.config.validation import TABLES
from verl.trainer.ppo import core_algos as algos


class Watched(dict):
    """Remembers the dotted names of what was read."""

    def __init__(self, values, read, prefix=""):
        super().__init__(values)
        self.read, self.prefix = read, prefix

    def __getitem__(self, key):
        value = super().__getitem__(key)
        if isinstance(value, dict):
            return Watched(value, self.read, f"{self.prefix}{key}.")
        self.read.add(self.prefix + key)
        return value


@pytest.mark.parametrize("loss_mode", CHOICES[f"{ACTOR}.policy_loss.loss_mode"])
def test_a_loss_reads_the_settings_that_are_said_to_be_its_own_and_no_others(loss_mode):
    values = {key: 1.5 for key in READ_BY if "." not in key}
    values["policy_loss"] = {key.split(".")[1]: 0.5 for key in READ_BY if "." in key}
    read: set[str] = set()
    config, ones = Watched(values, read), torch.ones(2, 3)
    select = algos.get_selection_fn(loss_mode)
    selection = select and select(-ones, -ones, ones, ones, config, 0)
    algos.policy_loss(
        loss_mode,
        log_prob=-ones,
        old_log_prob=-ones,
        advantages=ones,
        response_mask=ones,
        loss_agg_mode="token-mean",
        config=config,
        denominator=algos.LossDenominator.of(ones),
        teacher_log_prob=-ones,
        selection=selection,
    )
    assert read == {key for key, modes in READ_BY.items() if loss_mode in modes}


def test_a_setting_of_another_loss_is_noted():
    settings = [f"{ACTOR}.policy_loss.dro_beta=0.1", f"{ACTOR}.loss_scale_factor=100"]
    notes = settings_without_effect(load_config(settings))
    assert notes == [
        f"{ACTOR}.policy_loss.dro_beta=0.1 has no effect: it is for loss_mode dro, not vanilla.",
        f"{ACTOR}.loss_scale_factor=100 has no effect: it is for loss_agg_mode seq-mean-token-sum-norm.",
    ]
    chosen = [
        f"{ACTOR}.policy_loss.loss_mode=dro",
        f"{ACTOR}.loss_agg_mode=seq-mean-token-sum",
        f"{ACTOR}.policy_loss.dro_beta=0.1",
    ]
    assert settings_without_effect(load_config(chosen)) == []
    own = [f"{ACTOR}.policy_loss.loss_mode=my_losses:mine", f"{ACTOR}.policy_loss.dro_beta=0.1"]
    assert settings_without_effect(load_config(own)) == []


def test_an_aggregation_that_a_loss_is_not_meant_for_is_noted():
    (note,) = settings_without_effect(load_config([f"{ACTOR}.policy_loss.loss_mode=gspo"]))
    assert f"gspo is meant for {ACTOR}.loss_agg_mode=seq-mean-token-mean" in note
    assert set(MEANT_FOR) <= set(CHOICES[f"{ACTOR}.policy_loss.loss_mode"])
    assert set(MEANT_FOR.values()) <= set(CHOICES[f"{ACTOR}.loss_agg_mode"])


@pytest.mark.parametrize("key", IMPORTABLE)
def test_a_function_of_the_users_own_may_be_named_if_its_module_is_there(key, tmp_path, monkeypatch):
    (tmp_path / "my_own_functions.py").write_text("def mine(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    values = flat(load_config([f"{key}=my_own_functions:mine"]))
    TABLES.check(values)
    for wrong in ("no_such_module_here:mine", "my_own_functions:", "my_own_functions:not a name", ":mine"):
        with pytest.raises(ValueError, match=f"Found {key}={wrong}; expected package.module:function"):
            TABLES.check(values | {key: wrong})
    with pytest.raises(ValueError, match="or your own as package.module:function"):
        TABLES.check(values | {key: "nonsense"})
