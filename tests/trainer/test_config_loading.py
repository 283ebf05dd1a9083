"""Overrides: what is accepted, what is refused, and in which words."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.trainer.config.loading import known_keys, load_config, nearest_keys, parse_arguments


@pytest.mark.parametrize("prefix", ["", "+", "++"])
@pytest.mark.parametrize("key", ["trainer.val_before_train", "trainer.val_only", "trainer.seed"])
def test_a_key_may_be_set_with_or_without_plus(prefix, key):
    config = load_config([f"{prefix}{key}=1"])
    assert config.trainer[key.split(".")[1]] == 1


def test_of_a_repeated_key_the_last_value_counts():
    config = load_config(
        ["trainer.seed=1", "+trainer.seed=2", "trainer.default_hdfs_dir=x", "++trainer.seed=3"]
    )
    assert config.trainer.seed == 3


@pytest.mark.parametrize(
    ("text", "value"),
    [("[]", []), ("['wandb']", ["wandb"]), ("[console,wandb]", ["console", "wandb"])],
)
def test_loggers_are_lists(text, value):
    assert load_config([f"trainer.logger={text}"]).trainer.logger == value


def test_interpolations_follow_what_was_set():
    config = load_config(["actor_rollout_ref.actor.ppo_epochs=3", "data.max_prompt_length=99"])
    assert config.critic.ppo_epochs == 3
    assert config.actor_rollout_ref.rollout.prompt_length == 99


def test_null_aliases_are_filled_in():
    config = load_config([])
    assert config.trainer.val_before_train is True
    assert config.trainer.val_only is False
    config = load_config(
        ["trainer.n_gpus_per_node=4", "trainer.nnodes=2", "critic.ppo_micro_batch_size_per_gpu=5"]
    )
    assert config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 64 // 8
    assert config.critic.ppo_micro_batch_size_per_gpu == 5
    assert config.critic.forward_micro_batch_size_per_gpu == 64 // 8


def test_a_home_folder_is_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    config = load_config(
        ["data.train_files=~/nq/train.parquet", "data.val_files=['~/a b.parquet',/c.parquet]"]
    )
    assert config.data.train_files == "/home/ada/nq/train.parquet"
    assert config.data.val_files == ["/home/ada/a b.parquet", "/c.parquet"]


def test_the_servers_interpreter_is_found_from_any_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    key = "actor_rollout_ref.rollout.vllm.python"
    for text, expected in (
        ("envs/vllm/bin/python", f"{tmp_path}/envs/vllm/bin/python"),
        ("/opt/python", "/opt/python"),
        ("python3", "python3"),
        ("null", None),
    ):
        assert load_config([f"{key}={text}"]).actor_rollout_ref.rollout.vllm.python == expected


def test_a_dictionary_sets_the_keys_in_it_and_leaves_the_others():
    config = load_config(["algorithm.kl_ctrl={type: adaptive, horizon: 10}"])
    assert config.algorithm.kl_ctrl == {
        "type": "adaptive",
        "kl_coef": 0.001,
        "target_kl": None,
        "horizon": 10,
    }


def test_model_overrides_are_open():
    config = load_config(
        [
            "actor_rollout_ref.model.override_config={attention_dropout: 0.1}",
            "+actor_rollout_ref.model.override_config.rope_theta=1e5",
        ]
    )
    assert config.actor_rollout_ref.model.override_config == {"attention_dropout": 0.1, "rope_theta": 1e5}


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("trainer.val_befor_train", "trainer.val_before_train"),
        ("rollout.n_agent", "actor_rollout_ref.rollout.n_agent"),
        ("n_agents", "actor_rollout_ref.rollout.n_agent"),
        ("actor_rollout_ref.rolout.temprature", "actor_rollout_ref.rollout.temperature"),
        ("data.max_promt_length", "data.max_prompt_length"),
        ("+trainer.valonly", "trainer.val_only"),
        ("algorithm.kl_ctrl.kl_coeff", "algorithm.kl_ctrl.kl_coef"),
    ],
)
def test_an_unknown_key_names_the_nearest_known_one(typed, meant):
    with pytest.raises(ValueError, match="unknown key") as error:
        load_config([f"{typed}=1"])
    assert f"nearest known key is '{meant}'" in str(error.value)


@pytest.mark.parametrize("text", ["EXPERIMENT_NAME=x", "+SEED=3", "RETRIEVER_URL=http://a:1,http://b:2"])
def test_a_key_in_capitals_is_a_variable_which_goes_before_the_command(text):
    with pytest.raises(ValueError, match="unknown key") as error:
        load_config([text])
    assert f"before the command: {text.lstrip('+')} bash <the script>" in str(error.value)


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_one_wrong_letter_still_finds_the_key(data):
    key = data.draw(st.sampled_from(KEYS))
    place = data.draw(st.integers(0, len(key) - 1))
    typed = key[:place] + "q" + key[place + 1 :]
    assert key in nearest_keys(typed, KEYS)


KEYS = [key for key in known_keys() if len(key) > 12]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("trainer.seed=1,2", "sweep"),
        ("~trainer.seed", "cannot be removed"),
        ("trainer.seed", "expected key=value"),
        ("--config-name=other", "expected key=value"),
        ("algorithm.kl_ctrl=3", "a group of keys"),
        ("hydra.run.dir=x", "default_local_dir"),
        ("trainer.experiment_name=a=b", "in quotes"),
    ],
)
def test_what_cannot_be_read_is_said(text, words):
    with pytest.raises(ValueError, match=words):
        load_config([text])


def test_reading_a_key_that_does_not_exist_raises():
    with pytest.raises(AttributeError):
        _ = load_config([]).trainer.sed


def test_an_unknown_configuration_names_the_known_ones():
    with pytest.raises(ValueError, match="ppo_trainer"):
        load_config([], "ppo_deepspeed_trainer")


def test_help_prints_every_key(capsys):
    with pytest.raises(SystemExit) as stop:
        parse_arguments(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert all(f"{key.split('.')[-1]}:" in text for key in known_keys())


def test_print_shows_the_result(capsys):
    with pytest.raises(SystemExit):
        parse_arguments(["trainer.seed=41", "--print"])
    assert "seed: 41" in capsys.readouterr().out
