"""Mistakes in a configuration are found before anything starts, with what was found and what to do."""

import copy
import importlib.util
import json
import math

import pytest
from omegaconf import ListConfig, OmegaConf

from verl.trainer.config import load_config, settings_without_effect, validate
from verl.trainer.config.keys import FIXED, ROLLOUT
from verl.trainer.config.limits import CHOICES, NULLABLE, RANGES


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> list[str]:
    """Overrides that make a valid GRPO run of one process."""
    tmp_path = tmp_path_factory.mktemp("files")
    for name in ("train.parquet", "test.parquet"):
        (tmp_path / name).write_bytes(b"PAR1")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    return [
        f"data.train_files={tmp_path}/train.parquet",
        f"data.val_files={tmp_path}/test.parquet",
        f"actor_rollout_ref.model.path={tmp_path}/model",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n_agent=8",
        "data.train_batch_size=32",
    ]


@pytest.fixture(scope="module")
def loaded(good):
    return load_config(good)


@pytest.fixture()
def config(loaded):
    return copy.deepcopy(loaded)


def check_with(config, key: str, value: object) -> None:
    OmegaConf.update(config, key, value)
    validate(config)


def check(overrides: list[str], format_reward: bool = False) -> None:
    validate(load_config(overrides), format_reward=format_reward)


def text_of(value: object) -> str:
    return "null" if value is None else str(value)


def test_a_good_configuration_passes(good):
    check(good)


@pytest.mark.parametrize("key", CHOICES)
def test_a_choice_that_does_not_exist_is_refused(key, config):
    with pytest.raises(ValueError, match="expected one of") as error:
        check_with(config, key, "nonsense")
    assert key in str(error.value) and text_of(CHOICES[key][0]) in str(error.value)


@pytest.mark.parametrize("key", RANGES)
def test_a_number_out_of_its_range_is_refused(key, config):
    low, high, _ = RANGES[key]
    default = OmegaConf.select(config, key)
    is_float = isinstance(default, float) or float in NULLABLE.get(key, ())
    for value in [low - (0.5 if is_float else 1)] + ([high + 1] if high < math.inf else []):
        with pytest.raises(ValueError, match="expected") as error:
            check_with(config, key, value)
        assert f"Found {key}=" in str(error.value)


@pytest.mark.parametrize("key", FIXED)
def test_a_key_that_may_not_change_says_why(key, config):
    value, types = OmegaConf.select(config, key), NULLABLE.get(key, ())
    if isinstance(value, bool):
        other: object = not value
    else:
        other = 7 if isinstance(value, int | float) or int in types else "fp16"
    with pytest.raises(ValueError) as error:
        check_with(config, key, other)
    assert FIXED[key] in str(error.value)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trainer.total_epochs=abc", "expected a whole number"),
        ("trainer.total_epochs=1.5", "expected a whole number"),
        ("trainer.nnodes=true", "expected a whole number"),
        ("trainer.total_epochs=null", "expected a whole number"),
        ("do_search=1", "expected true or false"),
        ("data.train_data_num=many", "a whole number or null"),
        ("trainer.logger=wandb", "expected a list"),
        ("trainer.logger=[nodepad]", "expected any of: console"),
        ("trainer.val_modes=[]", "expected one or both"),
        ("data.max_start_length=512", "expected the first to be smaller"),
        ("data.train_batch_size=16", "ppo_mini_batch_size=256 .* expected at most 128"),
        ("algorithm.kl_ctrl.type=adaptive", "expected both"),
        ("critic.forward_micro_batch_size=null", "Found no critic.forward_micro_batch_size"),
        ("actor_rollout_ref.actor.optim.betas=[0.9]", "two numbers"),
        ("data.train_files=/nowhere/train.parquet", "Found no file at data.train_files"),
        ("data.val_files=[/nowhere/a.parquet]", "Found no file at data.val_files"),
        ("data.extra_val_files=/nowhere/a.parquet", "Found no file at data.extra_val_files"),
        ("data.train_files=null", "Set data.train_files="),
        ("actor_rollout_ref.model.path=/nowhere/model", "Found no folder"),
        ("actor_rollout_ref.model.path=null", "Hugging Face model folder"),
        ("actor_rollout_ref.model.lora_adapter_path=/nowhere/adapter", "Found no adapter_config.json"),
        ("actor_rollout_ref.model.target_modules=3", r"expected text or a list \[a,b\]"),
        ("custom_reward_function.path=/nowhere/reward.py", "expected a python file"),
        ("trainer.resume_from_path=/somewhere", "expected resume_mode=from_path"),
        ("trainer.resume_mode=from_path", "not a folder"),
        ("reward_model.retrieval_score=0.1", "main_ppo_format"),
        (f"{ROLLOUT}.placement=apart", f"expected {ROLLOUT}.name=vllm"),
        (f"{ROLLOUT}.tensor_model_parallel_size=2", "a whole model in each process; expected 1"),
        (f"{ROLLOUT}.keep_partial=true", "Set for example .*straggler_factor=4"),
        (f"{ROLLOUT}.vllm.num_servers=2", "which is for servers.*placement=apart"),
        (f"{ROLLOUT}.vllm.engine_args=3", "expected a dictionary"),
    ],
)
def test_a_mistake_says_what_was_found_and_what_to_do(override, words, good):
    with pytest.raises(ValueError, match=words):
        check([*good, override])


def test_a_reference_that_nothing_asks_for_is_not_reset(good):
    reset = "actor_rollout_ref.ref.reset_every=5"
    check([*good, reset, "algorithm.kl_ctrl.kl_coef=0.01"])
    with pytest.raises(ValueError, match="no KL to a reference is asked for; expected null"):
        check([*good, reset, "algorithm.kl_ctrl.kl_coef=0"])


APART = [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.placement=apart"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["server_urls=[gpu7:8000]"], "expected http://host:port"),
        (["server_urls=http://a:1", "num_servers=2"], "expected one or the other"),
        (["weight_transfer=nccl"], "expected gloo, disk or auto"),
        (["python=/nowhere/bin/python"], "Found no interpreter at"),
        (["python=python3"], "vLLM is not installed there; run `pip install vllm`"),
    ],
)
def test_servers_apart_are_checked_before_anything_starts(overrides, words, good, tmp_path, monkeypatch):
    (tmp_path / "python3").write_text("#!/bin/sh\nexit 1\n")  # an interpreter that does not find vLLM
    (tmp_path / "python3").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(ValueError, match=words):
        check([*good, *APART, "trainer.device=cpu", *(f"{ROLLOUT}.vllm.{text}" for text in overrides)])


def test_servers_that_run_already_need_no_vllm_here(good):
    check([*good, *APART, f"{ROLLOUT}.vllm.server_urls=['http://a:1','http://b:2']"])


def test_vllm_must_be_installed_where_it_is_to_run(good, tmp_path, monkeypatch):
    """The one place where a missing package is looked for by a name that tests can make present."""
    (tmp_path / "vllm").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    if not has_vllm():
        with pytest.raises(ValueError, match="run `pip install vllm`.*name=native"):  # a folder is no package
            check([*good, f"{ROLLOUT}.name=vllm"])
    (tmp_path / "vllm" / "__init__.py").write_text("")
    check([*good, f"{ROLLOUT}.name=vllm"])


def has_vllm() -> bool:
    spec = importlib.util.find_spec("vllm")
    return spec is not None and spec.origin is not None


def test_arguments_of_vllm_are_open(good):
    rollout = load_config([f"+{ROLLOUT}.vllm.engine_args.swap_space=2"]).actor_rollout_ref.rollout
    assert rollout.vllm.engine_args == {"swap_space": 2}


def test_the_local_backend_has_one_process(good):
    check([*good, "trainer.backend=local"])
    with pytest.raises(ValueError, match="expected trainer.backend=ray"):
        check([*good, "trainer.backend=local", "trainer.n_gpus_per_node=2"])


def test_a_teacher_is_a_model(good):
    distillation = [*good, "actor_rollout_ref.actor.policy_loss.loss_mode=distillation"]
    with pytest.raises(ValueError, match="no folder at actor_rollout_ref.teacher.path=/nope/teacher"):
        check([*distillation, "actor_rollout_ref.teacher.path=/nope/teacher"])


def test_validation_alone_looks_at_no_training_batch(good):
    check([*good, "+trainer.val_only=true", "data.train_batch_size=1"])


def test_a_model_may_be_named_as_on_the_hub_and_a_folder_must_hold_one(good, tmp_path):
    check([*good, "actor_rollout_ref.model.path=Qwen/Qwen2.5-3B"])
    with pytest.raises(ValueError, match="without a config.json"):
        check([*good, f"actor_rollout_ref.model.path={tmp_path}"])


def test_the_format_program_takes_its_scores_and_no_other_reward(good):
    check([*good, "reward_model.structure_format_score=0.2"], format_reward=True)
    with pytest.raises(ValueError, match="a reward of its own"):
        check([*good, f"custom_reward_function.path={__file__}"], format_reward=True)


def test_lists_of_files_and_addresses_are_taken(good):
    file = good[1].partition("=")[2]
    config = load_config(
        [*good, f"data.val_files=[{file},{file}]"]
        + ["retriever.url=['http://a:8000/retrieve','http://b:8000/retrieve']"]
    )
    assert isinstance(config.retriever.url, ListConfig)
    validate(config)


def test_a_setting_without_meaning_here_is_said():
    assert settings_without_effect(load_config([])) == []
    (line,) = settings_without_effect(load_config(["actor_rollout_ref.rollout.load_format=auto"]))
    assert line.startswith("actor_rollout_ref.rollout.load_format=auto has no effect: ")
    parallel = [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.tensor_model_parallel_size=2"]
    (line,) = settings_without_effect(load_config(parallel))
    assert "tensor_model_parallel_size=2 has no effect" in line and "placement=apart splits it" in line
    assert settings_without_effect(load_config([*parallel, f"{ROLLOUT}.placement=apart"])) == []


def test_restarts_in_a_run_without_ray_are_said_to_have_no_effect():
    for backend in ("auto", "local"):
        config = load_config(["trainer.max_restarts=2", f"trainer.backend={backend}"])
        (line,) = settings_without_effect(config)
        assert line.startswith("trainer.max_restarts=2 has no effect: ") and "trainer.backend=ray" in line
    for more in ("trainer.backend=ray", "trainer.nnodes=2", "trainer.rollout_pool.n_gpus_per_node=1"):
        assert settings_without_effect(load_config(["trainer.max_restarts=2", more])) == []
