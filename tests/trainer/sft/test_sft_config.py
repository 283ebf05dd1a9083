"""Supervised training's configuration: each key is read or refused, and mistakes are found at the start."""

import json
import re

import pytest
from config_places import is_read
from omegaconf import OmegaConf

from verl.trainer.config.loading import CONFIG_DIR, known_keys
from verl.trainer.config.sft_keys import (
    CHOICES,
    CONFIG_NAME,
    FIXED,
    NO_EFFECT,
    NULLABLE,
    RANGES,
    READ_IN,
    TABLES,
    TYPES,
    load_sft_config,
    validate_sft,
)

KEYS = known_keys(CONFIG_NAME)


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> list[str]:
    """Overrides that make a valid run."""
    folder = tmp_path_factory.mktemp("files")
    for name in ("train.parquet", "val.parquet"):
        (folder / name).write_bytes(b"PAR1")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    return [
        f"data.train_files={folder}/train.parquet",
        f"data.val_files={folder}/val.parquet",
        f"model.partial_pretrain={folder}/model",
    ]


def test_rule_12_every_key_is_in_exactly_one_table():
    for key in KEYS:
        assert sum(key in table for table in (READ_IN, FIXED, NO_EFFECT)) == 1, key
    for table in (READ_IN, FIXED, NO_EFFECT, NULLABLE, CHOICES, RANGES, TYPES):
        assert set(table) <= set(KEYS)


@pytest.mark.parametrize("key", READ_IN)
def test_rule_12_a_key_is_read_where_the_table_says(key):
    assert is_read(key, READ_IN[key]), READ_IN[key]


def test_every_key_that_is_null_by_default_has_a_type():
    raw = OmegaConf.load(CONFIG_DIR / f"{CONFIG_NAME}.yaml")
    assert {key for key in KEYS if OmegaConf.select(raw, key, default=None) is None} <= set(NULLABLE)


def test_every_line_that_sets_a_key_says_what_it_is():
    text = (CONFIG_DIR / f"{CONFIG_NAME}.yaml").read_text(encoding="utf-8")
    silent = [line for line in text.splitlines() if re.match(r" *\w+: \S", line) and "#" not in line]
    assert [line.strip() for line in silent] == ["experiment_name: test"]


def test_the_keys_of_verls_own_file_are_all_there():
    names = """
        data.train_batch_size data.micro_batch_size data.micro_batch_size_per_gpu data.train_files
        data.val_files data.prompt_key data.response_key data.prompt_dict_keys
        data.response_dict_keys data.multiturn.enable data.multiturn.messages_key
        data.max_length data.truncation data.balance_dp_token data.chat_template
        data.custom_cls.path data.custom_cls.name model.partial_pretrain
        model.fsdp_config.model_dtype model.fsdp_config.wrap_policy.min_num_params
        model.fsdp_config.cpu_offload model.fsdp_config.offload_params model.external_lib
        model.enable_gradient_checkpointing model.trust_remote_code model.lora_rank
        model.lora_alpha model.target_modules model.use_liger optim.lr optim.betas
        optim.weight_decay optim.warmup_steps_ratio optim.clip_grad optim.lr_scheduler
        ulysses_sequence_parallel_size use_remove_padding trainer.default_local_dir
        trainer.default_hdfs_dir trainer.resume_path trainer.project_name
        trainer.experiment_name trainer.total_epochs trainer.total_training_steps trainer.logger
        trainer.seed trainer.save_freq trainer.test_freq trainer.nnodes trainer.n_gpus_per_node
        trainer.max_ckpt_to_keep model.strategy
    """
    assert set(names.split()) <= set(KEYS)


def test_a_good_configuration_passes_and_has_no_notes(good):
    config = load_sft_config(good)
    validate_sft(config)
    assert TABLES.without_effect(config) == []


def test_a_key_without_effect_is_said(good):
    (line,) = TABLES.without_effect(load_sft_config([*good, "data.balance_dp_token=true"]))
    assert line.startswith("data.balance_dp_token=True has no effect: ")


@pytest.mark.parametrize("key", FIXED)
def test_a_key_that_may_not_change_says_why(good, key):
    value = {bool: "true", int: "7"}.get(type(TABLES.defaults[key]), "something")
    with pytest.raises(ValueError, match=re.escape(FIXED[key])):
        validate_sft(load_sft_config([*good, f"{key}={value}"]))


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("data.max_len", "data.max_length"),
        ("optim.warmup_ratio", "optim.warmup_steps_ratio"),
        ("trainer.epochs", "trainer.total_epochs"),
    ],
)
def test_an_unknown_key_names_near_ones(typed, meant):
    with pytest.raises(ValueError, match="unknown key") as error:
        load_sft_config([f"{typed}=1"])
    assert meant in str(error.value)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optim.betas=[0.9]", "two numbers"),
        ("data.truncation=middle", "expected one of: error, left, right"),
        ("data.train_batch_size=0", "at least 1"),
        ("optim.lr=-1", "0 or more"),
        ("data.val_files=null trainer.test_freq=5", "without data.val_files"),
        ("data.segments_key=segments data.multiturn.enable=true", "two forms of rows"),
        ("model.partial_pretrain=/nowhere/at/all", "Found no folder"),
        ("model.lora_adapter_path=/nowhere/adapter", "no adapter_config.json at model.lora_adapter_path"),
        ("data.train_files=/nowhere.parquet", "Found no file"),
        ("trainer.resume_path=/nowhere", "not a folder"),
        ("trainer.logger=[paper]", "expected any of: console"),
        ("trainer.n_gpus_per_node=2 trainer.backend=local", "trainer.backend=ray"),
        ("data.max_length=many", "a whole number"),
    ],
)
def test_mistakes_are_found_before_anything_starts(good, override, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        validate_sft(load_sft_config([*good, *override.split()]))


def test_other_names_mean_the_same():
    config = load_sft_config(
        ["data.micro_batch_size=12", "trainer.n_gpus_per_node=3", "optim.warmup_steps_ratio=0.25",
         "trainer.resume_path=~/run/global_step_3"]
    )  # fmt: skip
    assert config.data.micro_batch_size_per_gpu == 4
    assert config.optim.lr_warmup_steps_ratio == 0.25
    assert config.trainer.resume_mode == "from_path"
    assert config.trainer.resume_from_path.startswith("/") and config.trainer.resume_from_path.endswith("_3")
