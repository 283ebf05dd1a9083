"""Settings: what is accepted, what is refused, in which words, and which layer wins."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.config import Config, load, load_config
from verl.config.command_line import read_arguments
from verl.config.compatibility import RL
from verl.config.keys import settable
from verl.config.loading import nearest_keys

KEYS = list(settable(Config))


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_a_key_may_be_set_with_or_without_plus(prefix):
    assert load_config([f"{prefix}trainer.val_before_train=false"]).trainer.val_before_train is False


def test_of_a_repeated_key_the_last_value_counts():
    line = ["trainer.seed=1", "+trainer.seed=2", "trainer.default_hdfs_dir=null", "++trainer.seed=3"]
    assert load_config(line).trainer.seed == 3


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("trainer.logger=[]", []),
        ("trainer.logger=['wandb']", ["wandb"]),
        ("trainer.logger=[console,wandb]", ["console", "wandb"]),
        ("trainer.project_name=2024", "2024"),
        ("trainer.project_name=a=b (c)", "a=b (c)"),
        (r"trainer.project_name='it\'s, 1'", "it's, 1"),
        ("trainer.max_ckpt_to_keep=NULL", None),
        ("trainer.val_only=TRUE", True),
        ("retriever.timeout=1e-3", 0.001),
        ("retriever.timeout=3", 3.0),
        ("retriever.url=[http://a:1/x, 'http://b']", ["http://a:1/x", "http://b"]),
        ("retriever.url=http://a:1/x?y={z}", "http://a:1/x?y={z}"),
        ("trainer.project_name=${trainer.experiment_name}-2", "gsm8k-2"),
        (r'trainer.project_name="a\.b, c:d"', r"a\.b, c:d"),
        ("retriever.url=[gpu7:8000,gpu8:8000]", ["gpu7:8000", "gpu8:8000"]),
    ],
)
def test_a_value_is_read_as_its_key_holds_it(argument, value):
    key = argument.partition("=")[0]
    config = load_config([argument])
    block, name = key.split(".")
    assert config[block][name] == value and type(config[block][name]) is type(value)


def test_defaults_follow_the_keys_that_they_name():
    config = load_config(["actor_rollout_ref.actor.ppo_epochs=3", "data.max_prompt_length=99"])
    assert config.critic.ppo_epochs == 3 and config.actor_rollout_ref.rollout.prompt_length == 99
    assert config.trainer.default_local_dir == "checkpoints/verl_examples/gsm8k"


def test_a_whole_runs_micro_batch_is_shared_by_its_processes():
    config = load_config(
        ["trainer.n_gpus_per_node=4", "trainer.nnodes=2", "critic.ppo_micro_batch_size_per_gpu=5"]
    )
    assert config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 64 // 8
    assert config.critic.ppo_micro_batch_size_per_gpu == 5
    actor = "actor_rollout_ref.actor"
    config = load_config(["trainer.n_gpus_per_node=4", f"{actor}.ppo_micro_batch_size=8"])
    assert config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 2
    both = [f"{actor}.ppo_micro_batch_size_per_gpu=3", f"{actor}.ppo_micro_batch_size=8"]
    assert load_config(both).actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 3


def test_a_home_folder_is_expanded_wherever_a_path_is_read(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    config = load_config(
        [
            "data.train_files=~/nq/train.parquet",
            "data.val_files=['~/a b.parquet',/c.parquet]",
            "actor_rollout_ref.model.path=~/models/x",
            "critic.model.tokenizer_path=~/models/x",
        ]
    )
    assert config.data.train_files == "/home/ada/nq/train.parquet"
    assert config.data.val_files == ["/home/ada/a b.parquet", "/c.parquet"]
    assert config.actor_rollout_ref.model.path == config.critic.model.path == "/home/ada/models/x"


def test_a_dictionary_sets_the_keys_in_it_and_leaves_the_others():
    for text in ("{type: adaptive, horizon: 10}", "{type:adaptive,horizon:10}"):
        control = load_config([f"algorithm.kl_ctrl={text}"]).algorithm.kl_ctrl
        values = (control.type, control.kl_coef, control.target_kl, control.horizon)
        assert values == ("adaptive", 0.001, None, 10)


def test_open_keys_take_any_key():
    config = load_config(
        [
            "actor_rollout_ref.model.override_config={attention_dropout: 0.1}",
            "+actor_rollout_ref.model.override_config.rope_theta=1e5",
            "+actor_rollout_ref.rollout.vllm.engine_args.swap_space=2",
        ]
    ).actor_rollout_ref
    assert config.model.override_config == {"attention_dropout": 0.1, "rope_theta": 1e5}
    assert config.rollout.vllm.engine_args == {"swap_space": 2}


def test_the_layers_are_defaults_environment_files_and_the_command_line(tmp_path):
    first = tmp_path / "a.yaml"
    second = tmp_path / "b.toml"
    first.write_text("trainer: {seed: 2, save_freq: 2}\nalgorithm.lam: 0.5\nretriever: {timeout: 1e1}\n")
    second.write_text("max_turns = 3\n[trainer]\nsave_freq = 3\ntest_freq = 3\n")
    environment = {f"VERL__TRAINER__{name}_FREQ": "1" for name in ("SAVE", "TEST")}
    environment |= {"VERL__max_turns": "1", "VERL__RETRIEVER__TOPK": "1", "OTHER": "x"}
    line = ["trainer.test_freq=4", "@", str(first), f"@{second}"]
    config = load(line, environment=environment).config
    assert (config.retriever.topk, config.trainer.seed, config.max_turns) == (1, 2, 3)
    assert (config.trainer.save_freq, config.trainer.test_freq) == (3, 4)
    assert (config.algorithm.lam, config.retriever.timeout) == (0.5, 10.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("trainer:\n  sede: 1\n", "unknown key 'trainer.sede'.*in .*wrong.yaml"),
        ("trainer: {seed: x}\n", "Found trainer.seed=x; expected a whole number"),
        ("trainer: [1\n", "wrong.yaml: can't be read"),
        ("- 1\n", "found list; expected keys"),
    ],
)
def test_a_mistake_in_a_file_is_said_as_one_on_the_command_line(text, words, tmp_path):
    (tmp_path / "wrong.yaml").write_text(text)
    with pytest.raises(ValueError, match=words):
        load_config([f"@{tmp_path}/wrong.yaml"])


def test_a_mistake_in_the_environment_names_the_variable():
    with pytest.raises(ValueError, match="unknown key 'trainer.sede' in 'VERL__TRAINER__SEDE=1'"):
        load([], environment={"VERL__TRAINER__SEDE": "1"})


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


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_one_wrong_letter_still_finds_the_key(data):
    key = data.draw(st.sampled_from([key for key in KEYS if len(key) > 12]))
    place = data.draw(st.integers(0, len(key) - 1))
    assert key in nearest_keys(key[:place] + "q" + key[place + 1 :], KEYS)


def test_what_keys_of_skyrl_are_called_here_are_keys():
    named = [
        text.split(" is ")[1].removesuffix(" here.") for text in RL.removed.values() if "SkyRL's" in text
    ]
    assert len(named) > 50 and set(named) <= set(KEYS)


@pytest.mark.parametrize("text", ["EXPERIMENT_NAME=x", "+SEED=3", "RETRIEVER_URL=http://a:1,http://b:2"])
def test_a_key_in_capitals_is_a_variable_which_goes_before_the_command(text):
    with pytest.raises(ValueError, match="unknown key") as error:
        load_config([text])
    assert f"before the command: {text.lstrip('+')} bash <the script>" in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("trainer.seed=1,2", "sweep"),
        ("retriever.url=http://a,http://b", "sweep"),
        ("~trainer.sede", "nearest known key is 'trainer.seed'"),
        ("trainer.seed", "expected key=value"),
        ("--config-nam=other", "expected key=value"),
        ("algorithm.kl_ctrl=3", "a group of keys; expected one of: algorithm.kl_ctrl.type"),
        ("hydra.run.dir=x", "default_local_dir"),
        ("trainer.logger=[a", "bracket has no end"),
        ("trainer.project_name='a", "a quote .* has no end"),
        ("retriever.url='a' b", "follows a value"),
        ("trainer.project_name=${trainer.nam}", "there is no such key"),
        ("trainer.project_name=${trainer.project_name}", "leads back to itself"),
        ("@nowhere.yaml", "Found no file"),
        ("@config.json", "ends in .yaml, .yml or .toml"),
        ("algorithm.filter_groups.refill=false", "prompt_selection.filter_groups.max_num_gen_batches=1"),
        ("trainer.max_steps=5", "SkyRL's trainer.max_steps is trainer.total_training_steps here"),
        ("generator.n_samples_per_prompt=5", "is actor_rollout_ref.rollout.n_agent here"),
    ],
)
def test_what_cannot_be_read_is_said(text, words):
    with pytest.raises(ValueError, match=words):
        load_config([text])


@pytest.mark.parametrize(
    "arguments",
    [
        ["--config-name", "ppo_megatron_trainer", "trainer.seed=1"],
        ["trainer.seed=1", "--config-name=ppo_megatron_trainer"],
        ["--config-name", "ppo_trainer", "--config-name=ppo_megatron_trainer.yaml", "trainer.seed=1"],
    ],
)
def test_the_configuration_is_chosen_as_with_hydra(arguments):
    config = read_arguments(arguments).config
    assert config.trainer.seed == 1
    assert config.actor_rollout_ref.actor.strategy == config.critic.strategy == "megatron"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--config-name"], "without a name"),
        (["--print=1"], "Found --print with a value; expected it alone"),
        (["--config-name", "sft_trainer"], "expected one of: ppo_trainer"),
    ],
)
def test_a_configuration_of_another_program_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        read_arguments(arguments)
