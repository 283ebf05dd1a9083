"""What the notes at a run's start say of settings that change nothing is true."""

import pytest
import torch

from verl.algos.policy_losses import loss_traits
from verl.config import Config, load_config
from verl.config.keys import keys_of
from verl.config.policy import ACTOR, ROLLOUT
from verl.planning.config_validation import settings_without_effect
from verl.trainer.ppo import core_algos as algos

LOSS_MODES = keys_of(Config)[f"{ACTOR}.policy_loss.loss_mode"].choices
LOSS_AGG_MODES = keys_of(Config)[f"{ACTOR}.loss_agg_mode"].choices


class Watched:
    """A block that remembers the dotted names of what was read."""

    def __init__(self, read, prefix=""):
        self.read = read
        self.prefix = prefix

    def __getattr__(self, name):
        if name == "policy_loss":
            return Watched(self.read, "policy_loss.")
        if name == "global_batch_info":  # no setting: verl's actor counts a batch there
            return None
        self.read.add(self.prefix + name)
        return 1.5


@pytest.mark.parametrize("loss_mode", LOSS_MODES)
def test_a_loss_reads_the_settings_that_are_said_to_be_its_own_and_no_others(loss_mode):
    read: set[str] = set()
    config = Watched(read)
    ones = torch.ones(2, 3)
    select = loss_traits(loss_mode).select
    inputs = algos.LossInputs(
        log_prob=-ones,
        old_log_prob=-ones,
        advantages=ones,
        response_mask=ones,
        loss_agg_mode="token-mean",
        config=config,
        teacher_log_prob=-ones,
        selection=select and select(-ones, -ones, ones, ones, config, 0),
    )
    algos.policy_loss(loss_mode, inputs)
    assert read == set(loss_traits(loss_mode).reads)


def test_a_setting_of_another_loss_is_noted():
    settings = [f"{ACTOR}.tau_pos=2", f"{ACTOR}.loss_scale_factor=100"]
    notes = settings_without_effect(load_config(settings))
    assert notes == [
        f"{ACTOR}.tau_pos=2 has no effect: it is for loss_mode sapo, not vanilla.",
        f"{ACTOR}.loss_scale_factor=100 has no effect: it is for loss_agg_mode seq-mean-token-sum-norm.",
    ]
    chosen = [
        f"{ACTOR}.policy_loss.loss_mode=dro_sequence",
        f"{ACTOR}.loss_agg_mode=seq-mean-token-sum",
        f"{ACTOR}.policy_loss.dro_beta=0.1",
    ]
    assert settings_without_effect(load_config(chosen)) == []
    own = [f"{ACTOR}.policy_loss.loss_mode=json:loads", f"{ACTOR}.policy_loss.dro_beta=0.1"]
    assert settings_without_effect(load_config(own)) == []


def test_an_aggregation_that_a_loss_is_not_meant_for_is_noted():
    (note,) = settings_without_effect(load_config([f"{ACTOR}.policy_loss.loss_mode=gspo"]))
    assert f"gspo is meant for {ACTOR}.loss_agg_mode=seq-mean-token-mean" in note
    meant_for = {loss_traits(name).meant_for for name in LOSS_MODES} - {None}
    assert meant_for <= set(LOSS_AGG_MODES)


@pytest.mark.parametrize("key", [f"{ACTOR}.policy_loss.loss_mode", "algorithm.adv_estimator"])
def test_a_function_of_the_users_own_may_be_named_if_its_module_is_there(key, tmp_path, monkeypatch):
    (tmp_path / "my_own_functions.py").write_text("def mine(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    load_config([f"{key}=my_own_functions:mine"])
    for wrong in ("no_such_module_here:mine", "my_own_functions:", "my_own_functions:not a name", ":mine"):
        with pytest.raises(ValueError, match=f"Found {key}={wrong}; expected package.module:function"):
            load_config([f"{key}={wrong}"])
    with pytest.raises(ValueError, match="or your own as package.module:function"):
        load_config([f"{key}=nonsense"])


def test_a_setting_without_meaning_beside_the_others_is_said():
    assert settings_without_effect(load_config([])) == []
    parallel = [f"{ROLLOUT}.tensor_model_parallel_size=2", "trainer.device=cpu"]
    (line,) = settings_without_effect(load_config(parallel))
    assert "tensor_model_parallel_size=2 has no effect" in line and "name=vllm splits it" in line
    assert settings_without_effect(load_config([*parallel, f"{ROLLOUT}.name=vllm"])) == []


def test_settings_of_weights_in_files_without_files_are_said_to_have_no_effect():
    files = [f"{ROLLOUT}.weight_dir=/tmp", f"{ROLLOUT}.anchor_every=3"]
    for transfer in ("ray", "collective"):
        lines = settings_without_effect(load_config([*files, f"{ROLLOUT}.weight_transfer={transfer}"]))
        assert [line.split("=")[0] for line in lines] == [f"{ROLLOUT}.anchor_every", f"{ROLLOUT}.weight_dir"]
        assert lines[1].endswith(f"no files are written with {ROLLOUT}.weight_transfer={transfer}.")
    (line,) = settings_without_effect(load_config([*files, f"{ROLLOUT}.weight_transfer=filesystem"]))
    assert line.startswith(f"{ROLLOUT}.anchor_every=3 has no effect: ") and "weight_transfer=delta" in line
    assert settings_without_effect(load_config([*files, f"{ROLLOUT}.weight_transfer=delta"])) == []
    gloo = [f"{ROLLOUT}.weight_backend=gloo", f"{ROLLOUT}.weight_transfer=filesystem"]
    (line,) = settings_without_effect(load_config(gloo))
    assert line.endswith(f"nothing is broadcast with {ROLLOUT}.weight_transfer=filesystem.")
    assert settings_without_effect(load_config([gloo[0], f"{ROLLOUT}.weight_transfer=collective"])) == []


def test_restarts_in_a_run_without_ray_are_said_to_have_no_effect():
    for backend in ("auto", "local"):
        config = load_config(["trainer.max_restarts=2", f"trainer.backend={backend}"])
        (line,) = settings_without_effect(config)
        assert line.startswith("trainer.max_restarts=2 has no effect: ") and "trainer.backend=ray" in line
    apart = f"{ROLLOUT}={{name: native, placement: apart}}"
    for more in ("trainer.backend=ray", "trainer.nnodes=2", apart):
        assert settings_without_effect(load_config(["trainer.max_restarts=2", more])) == []


def test_a_number_of_rewinds_without_rewinds_is_said_to_have_no_effect():
    (line,) = settings_without_effect(load_config(["trainer.max_rewinds=5"]))
    assert line.startswith("trainer.max_rewinds=5 has no effect: ") and "on_collapse=rewind" in line
    rewinds = ["trainer.max_rewinds=5", "trainer.on_collapse=rewind", "trainer.save_freq=5"]
    assert settings_without_effect(load_config(rewinds)) == []


def test_thrift_without_a_group_is_said_to_have_no_effect():
    (line,) = settings_without_effect(load_config(["algorithm.thrift=1"]))
    assert line.startswith("algorithm.thrift=1 has no effect: ") and "n_agent=1" in line
    assert settings_without_effect(load_config(["algorithm.thrift=1", f"{ROLLOUT}.n_agent=2"])) == []
