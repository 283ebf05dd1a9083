"""Changing a key changes what the run does: one entry for every key, looked at on real objects.

An entry: key -> (another value, observer, settings that make the key count). `key_observers` says what an
observer looks at; what it sees of the base run and of the changed one must differ.
"""

import copy
from functools import cache

import key_observers
import pytest
from tiny_training import write_model

from verl.config import Config, load_config
from verl.config.keys import settable

A = "actor_rollout_ref.actor"
R = "actor_rollout_ref.rollout"
REF = "actor_rollout_ref.ref"
C = "critic"
M = "actor_rollout_ref.model"
F = f"{A}.fsdp_config"
P = f"{A}.policy_loss"
T = "trainer"
ALG = "algorithm"
COR = "algorithm.rollout_correction"
FIL = "prompt_selection.filter_groups"
OVER = "reward_model.overlong_buffer"
REWARD = "custom_reward_function.path={files}/reward.py"
FOUR = "trainer.n_gpus_per_node=4"
GAE = "algorithm.adv_estimator=gae"
VLLM = f"{R}.name=vllm"
APART = f"{R}.placement=apart"
KL = "algorithm.kl_ctrl.kl_coef=0.1"
ADAPTIVE = "algorithm.kl_ctrl={{type: adaptive, kl_coef: 0.1, target_kl: 9, horizon: 99}}"
REJECTS = (f"{COR}.rollout_rs=token", f"{COR}.rollout_rs_threshold=9")
SIZES = ("tensor_model", "pipeline_model", "context")
OFFLOADS = ("param", "optimizer")
LOSSES = ("sapo", "clip_cov", "kl_cov", "dro_sequence", "distillation")
LOSS = {name: f"{P}.loss_mode={name}" for name in LOSSES}
NEAR = ("data.max_prompt_length=230", "data.max_response_length=100", f"{OVER}.enable=true")
POOL = "prompt_selection.difficulty_pools"
POOLS = f"{POOL}.enable=true"
LONG = "trainer.total_training_steps=6"
GDPO = (REWARD, "algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[score,format]")
UPDATES = f"{A}.ppo_mini_batch_size=4"

EFFECTS: dict[str, tuple] = {
    "data.train_files": ("{files}/other.parquet", "driver"),
    "data.val_files": ("{files}/other.parquet", "driver"),
    "data.mixture": ("[{{path: {files}/other.parquet, ratio: 2}}]", "driver"),
    "data.streaming": ("true", "driver"),
    "data.extra_val_files": ("{files}/other.parquet", "driver"),
    "trainer.evals": ("[{{files: {files}/other.parquet, every: 2}}]", "driver"),
    "data.train_data_num": (5, "driver"),
    "data.val_data_num": (2, "driver"),
    "data.prompt_key": ("question", "driver"),
    "data.max_prompt_length": (900, "agent"),
    "data.max_response_length": (90, "agent"),
    "data.max_start_length": (90, "agent"),
    "data.max_obs_length": (90, "agent"),
    "data.truncation": ("left", "driver", "data.max_prompt_length=4", "data.max_start_length=3"),
    "data.train_batch_size": (2, "driver"),
    "data.val_batch_size": (1, "driver"),
    "data.shuffle_train_dataloader": ("false", "driver"),
    f"{FIL}.enable": ("true", "driver"),
    f"{FIL}.metric": ("same", "driver", f"{FIL}.enable=true", REWARD),
    f"{FIL}.max_num_gen_batches": (1, "driver", f"{FIL}.enable=true"),
    "prompt_selection.retire_solved": (0, "driver", LONG),
    f"{POOL}.enable": ("true", "driver", LONG),
    f"{POOL}.easy_threshold": (0, "driver", LONG, POOLS, f"{POOL}.hard_threshold=-1"),
    f"{POOL}.hard_threshold": (-1, "driver", LONG, POOLS),
    f"{POOL}.easy_share": (1, "driver", LONG, POOLS, f"{POOL}.hard_share=0"),
    f"{POOL}.hard_share": (1, "driver", LONG, POOLS, f"{POOL}.easy_share=0"),
    f"{M}.path": ("{files}/other", "actor"),
    f"{M}.external_lib": ("no_such_module_here", "actor"),
    f"{M}.override_config": ("{{hidden_act: relu}}", "actor"),
    f"{M}.enable_gradient_checkpointing": ("true", "actor"),
    f"{M}.use_remove_padding": ("false", "actor"),
    f"{M}.trust_remote_code": ("true", "hub"),
    f"{M}.lora_rank": (2, "actor"),
    f"{M}.lora_alpha": (2, "actor", f"{M}.lora_rank=2"),
    f"{M}.target_modules": ("q_proj", "actor", f"{M}.lora_rank=2"),
    f"{M}.lora_adapter_path": ("{files}/nowhere", "actor"),
    f"{A}.strategy": ("megatron", "workers"),
    f"{A}.ppo_mini_batch_size": (8, "actor"),
    f"{A}.ppo_micro_batch_size_per_gpu": (2, "actor"),
    f"{A}.use_dynamic_bsz": ("true", "actor"),
    f"{A}.ppo_max_token_len_per_gpu": (30, "actor", f"{A}.use_dynamic_bsz=true"),
    f"{A}.grad_clip": (0.001, "actor"),
    f"{A}.max_step_kl": (1e-6, "actor"),
    f"{A}.clip_ratio": (0.01, "actor"),
    f"{A}.clip_ratio_low": (0.01, "actor"),
    f"{A}.clip_ratio_high": (0.01, "actor"),
    f"{A}.clip_ratio_c": (1.01, "actor"),
    f"{A}.tau_pos": (9, "actor", LOSS["sapo"]),
    f"{A}.tau_neg": (9, "actor", LOSS["sapo"]),
    f"{P}.loss_mode": ("gpg", "actor"),
    f"{P}.clip_cov_ratio": (1, "actor", LOSS["clip_cov"], f"{A}.clip_ratio=1", f"{A}.clip_ratio_high=99"),
    f"{P}.kl_cov_ratio": (1, "actor", LOSS["kl_cov"]),
    f"{P}.ppo_kl_coef": (5, "actor", LOSS["kl_cov"], f"{P}.kl_cov_ratio=1"),
    f"{P}.dro_beta": (5, "actor", LOSS["dro_sequence"]),
    f"{A}.loss_agg_mode": ("token-sum", "actor"),
    f"{A}.loss_scale_factor": (3, "actor", f"{A}.loss_agg_mode=seq-mean-token-sum-norm"),
    f"{A}.echo_coeff": (0.5, "driver"),
    f"{A}.entropy_coeff": (0.5, "actor"),
    f"{A}.entropy_ctrl.target_entropy": (30, "actor"),
    f"{A}.use_kl_loss": ("true", "actor"),
    f"{A}.kl_loss_coef": (0.5, "actor", f"{A}.use_kl_loss=true"),
    f"{A}.kl_loss_type": ("abs", "actor", f"{A}.use_kl_loss=true", f"{A}.kl_loss_coef=0.5"),
    f"{A}.ppo_epochs": (2, "actor"),
    f"{A}.shuffle": ("true", "driver"),
    f"{A}.ulysses_sequence_parallel_size": (2, "plan", FOUR),
    f"{A}.optim.name": ("muon", "actor"),
    f"{A}.optim.lr": (0.1, "actor"),
    f"{A}.optim.lr_warmup_steps": (4, "actor"),
    f"{A}.optim.lr_warmup_steps_ratio": (1, "actor"),
    f"{A}.optim.min_lr_ratio": (0.9, "actor", f"{A}.optim.warmup_style=cosine"),
    f"{A}.optim.warmup_style": ("linear", "actor"),
    f"{A}.optim.betas": ("[0.5,0.5]", "actor"),
    f"{A}.optim.weight_decay": (0.9, "actor"),
    f"{F}.param_offload": ("true", "plan"),
    f"{F}.optimizer_offload": ("true", "plan"),
    f"{F}.reshard_after_forward": ("false", "plan", FOUR),
    f"{F}.fsdp_size": (2, "plan", FOUR),
    f"{F}.model_dtype": ("bf16", "actor"),
    f"{F}.mixed_precision.param_dtype": ("bf16", "actor"),
    **{f"{A}.megatron.{size}_parallel_size": (2, "cut") for size in SIZES},
    f"{REF}.reset_every": (1, "driver", KL),
    f"{REF}.log_prob_micro_batch_size_per_gpu": (3, "actor"),
    f"{REF}.fsdp_config.param_offload": ("true", "plan", KL),
    "actor_rollout_ref.teacher.path": ("{files}/other", "checks", LOSS["distillation"]),
    f"{R}.name": ("vllm", "engine"),
    f"{R}.placement": ("apart", "plan", VLLM),
    f"{R}.num_processes": (2, "stream", APART),
    f"{R}.weight_transfer": ("ray", "weights_sent"),
    f"{R}.weight_backend": ("nccl", "checks", "trainer.device=cpu"),
    f"{R}.weight_dir": ("{out}/elsewhere", "weights_sent"),
    f"{R}.anchor_every": (2, "weights_sent"),
    f"{R}.temperature": (0.5, "driver"),
    f"{R}.top_k": (5, "driver"),
    f"{R}.top_p": (0.5, "driver"),
    f"{R}.min_p": (0.5, "agent"),
    f"{R}.do_sample": ("false", "driver"),
    f"{R}.n": (2, "driver", UPDATES),
    f"{R}.n_agent": (4, "driver"),
    f"{R}.dtype": ("bfloat16", "engine"),
    f"{R}.gpu_memory_utilization": (0.3, "vllm"),
    f"{R}.kv_cache_gb": (0.001, "engine"),
    f"{R}.free_cache_engine": ("false", "plan"),
    f"{R}.tensor_model_parallel_size": (2, "plan", VLLM, APART),
    f"{R}.max_num_batched_tokens": (4096, "vllm"),
    f"{R}.max_num_seqs": (77, "engine"),
    f"{R}.max_in_flight": (3, "agent"),
    f"{R}.straggler_factor": (3, "agent"),
    f"{R}.search_delay_steps": (3, "agent"),
    f"{R}.step_wise": ("true", "driver"),
    f"{R}.log_prob_micro_batch_size_per_gpu": (3, "actor"),
    f"{R}.vllm.engine_args": ("{{swap_space: 2}}", "vllm"),
    f"{R}.remote.urls": ("http://127.0.0.1:9", "checks", f"{R}.name=remote"),
    f"{C}.optim.lr": (0.1, "critic"),
    f"{C}.optim.lr_warmup_steps": (4, "critic"),
    f"{C}.optim.lr_warmup_steps_ratio": (1, "critic"),
    f"{C}.optim.min_lr_ratio": (0.9, "critic", f"{C}.optim.warmup_style=cosine"),
    f"{C}.optim.warmup_style": ("linear", "critic"),
    f"{C}.optim.betas": ("[0.5,0.5]", "critic"),
    f"{C}.optim.weight_decay": (0.9, "critic"),
    f"{C}.model.path": ("{files}/other", "critic"),
    f"{C}.model.enable_gradient_checkpointing": ("true", "critic"),
    f"{C}.model.lora_rank": (2, "critic"),
    **{f"{C}.model.fsdp_config.{kind}_offload": ("true", "plan", GAE) for kind in OFFLOADS},
    f"{C}.ppo_mini_batch_size": (8, "critic"),
    f"{C}.ppo_micro_batch_size_per_gpu": (2, "critic"),
    f"{C}.ppo_max_token_len_per_gpu": (30, "critic", f"{A}.use_dynamic_bsz=true"),
    f"{C}.grad_clip": (0.001, "critic"),
    f"{C}.cliprange_value": (0.001, "critic"),
    "reward_model.structure_format_score": (0.2, "structure"),
    "reward_model.final_format_score": (0.1, "structure"),
    "reward_model.retrieval_score": (0.1, "structure", "reward_model.structure_format_score=0.2"),
    "reward_model.search_cost": (0.1, "driver"),
    f"{OVER}.enable": ("true", "driver", *NEAR[:2]),
    f"{OVER}.len": (90, "driver", *NEAR),
    f"{OVER}.penalty_factor": (0.5, "driver", *NEAR),
    "custom_reward_function.path": ("{files}/reward.py", "driver"),
    "custom_reward_function.name": ("other", "driver", REWARD),
    "verifiers.max_failed_share": (0.1, "driver", REWARD, "custom_reward_function.name=unsure"),
    "verifiers.length_range": (100, "verdicts"),
    "verifiers.cpu_seconds": (0.3, "patience"),
    "environment.env_class": ("key_observers:Other", "environments"),
    "environment.max_workers": (1, "environments"),
    "environment.executor": ("inline", "environments"),
    "environment.step_timeout": (0.05, "environments"),
    "environment.max_failed_share": (0.1, "environments"),
    "environment.observation_format": ("raw", "environments"),
    "environment.env_config": ("{{'key_observers:Observed': {{a: 1}}}}", "environments"),
    "verifiers.code.api_url": ("http://127.0.0.1:1/other", "judged"),
    "verifiers.code.max_execution_time": (2, "judged", "verifiers.code.apply_perf_penalty=true"),
    "verifiers.code.pass_rate_reward_threshold": (0.9, "judged"),
    "verifiers.code.apply_perf_penalty": ("true", "judged"),
    "verifiers.code.drop_shown_tests": ("true", "judged"),
    "verifiers.judge.base_url": ("http://127.0.0.1:1/v1", "judged"),
    "verifiers.judge.model": ("another", "judged"),
    "verifiers.judge.max_tokens": (9, "judged"),
    "verifiers.judge.temperature": (0.1, "judged"),
    "verifiers.judge.timeout": (0.2, "judged"),
    "verifiers.judge.concurrency": (1, "judged"),
    "verifiers.judge.prices": ("[1,2]", "judged"),
    "verifiers.judge.cost_limit": (0.00001, "judged", "verifiers.judge.prices=[1,2]"),
    "retriever.url": ("http://127.0.0.1:9", "agent"),
    "retriever.topk": (5, "agent"),
    "retriever.timeout": (5, "agent"),
    "retriever.max_failed_share": (0.01, "driver"),
    "retriever.use_proxy": ("true", "agent"),
    "retriever.corpus_path": ("{files}/nowhere.jsonl", "corpora"),
    f"{ALG}.adv_estimator": ("rloo", "driver"),
    f"{ALG}.gamma": (0.9, "driver", GAE),
    f"{ALG}.lam": (0.9, "driver", GAE),
    f"{ALG}.norm_adv_by_std_in_grpo": ("false", "driver", REWARD),
    f"{ALG}.gdpo_reward_keys": ("[score]", "driver", *GDPO),
    f"{ALG}.gdpo_reward_weights": ("[1,3]", "driver", *GDPO),
    f"{ALG}.turn_credit": (1, "driver", REWARD),
    f"{ALG}.thrift": (1, "driver"),
    f"{ALG}.overlong_filter": ("true", "driver"),
    f"{ALG}.kl_penalty": ("k2", "driver", KL),
    f"{ALG}.kl_ctrl.type": ("adaptive", "driver", KL, "algorithm.kl_ctrl={{target_kl: 9, horizon: 9}}"),
    f"{ALG}.kl_ctrl.kl_coef": (0.5, "driver", KL),
    f"{ALG}.kl_ctrl.target_kl": (0.01, "driver", ADAPTIVE),
    f"{ALG}.kl_ctrl.horizon": (9, "driver", ADAPTIVE),
    f"{COR}.rollout_is": ("token", "driver"),
    f"{COR}.rollout_is_threshold": (1.1, "driver", f"{COR}.rollout_is=token"),
    f"{COR}.rollout_is_batch_normalize": ("true", "driver", f"{COR}.rollout_is=token"),
    f"{COR}.rollout_rs": ("sequence", "driver", *REJECTS),
    f"{COR}.rollout_rs_threshold": (1.1, "driver", *REJECTS),
    f"{COR}.rollout_rs_threshold_lower": (1, "driver", *REJECTS),
    f"{COR}.bypass_mode": ("true", "driver", UPDATES),
    f"{T}.total_epochs": (2, "driver", "trainer.total_training_steps=null", "trainer.total_epochs=1"),
    f"{T}.total_training_steps": (1, "driver"),
    f"{T}.project_name": ("mine", "driver", "trainer.default_local_dir={out}/${{trainer.project_name}}"),
    f"{T}.experiment_name": (
        "mine",
        "driver",
        "trainer.default_local_dir={out}/${{trainer.experiment_name}}",
    ),
    f"{T}.logger": ("[]", "driver"),
    f"{T}.nnodes": (2, "placed"),
    f"{T}.n_gpus_per_node": (2, "placed"),
    f"{T}.backend": ("ray", "placed"),
    f"{T}.device": ("cpu", "placed"),
    f"{T}.seed": (5, "driver"),
    f"{T}.save_freq": (1, "driver"),
    f"{T}.test_freq": (1, "driver"),
    f"{T}.default_local_dir": ("{out}/elsewhere", "driver"),
    f"{T}.resume_mode": ("latest", "driver"),
    f"{T}.resume_from_path": ("{files}", "checks"),
    f"{T}.remote_dir": ("file:///far", "uploads"),
    f"{T}.remote_keep": (1, "uploads", f"{T}.remote_dir=file:///far"),
    f"{T}.upload_deadline": (7, "uploads", f"{T}.remote_dir=file:///far"),
    f"{T}.max_ckpt_to_keep": (1, "driver", "trainer.save_freq=1"),
    f"{T}.async_checkpoint": ("false", "driver"),
    f"{T}.doctor_skip": ("[nonsense]", "start"),
    f"{T}.progress": ("live", "driver"),
    f"{T}.max_skipped_updates": (2, "driver"),
    f"{T}.val_before_train": ("false", "driver"),
    f"{T}.val_only": ("true", "driver"),
    f"{T}.val_modes": ("[sampled]", "driver"),
    f"{T}.critic_warmup": (1, "driver", GAE),
    f"{T}.max_restarts": (1, "restart"),
    f"{T}.on_collapse": ("rewind", "rewind"),
    f"{T}.max_rewinds": (5, "rewind", "trainer.on_collapse=rewind"),
    f"{T}.restart_timeout": (1, "restart", "trainer.max_restarts=1"),
    f"{T}.dry_run": ("true", "program"),
    f"{T}.dry_run_gpu_memory_gb": (1, "program", "trainer.dry_run=true"),
    f"{T}.num_trajectories_logged": (1, "driver"),
    f"{T}.async_training.max_staleness": (2, "stream"),
    f"{T}.async_training.repeatable": ("true", "stream", f"{T}.async_training.max_staleness=2"),
    f"{T}.async_training.group_deadline": (200, "stream"),
    f"{T}.async_training.too_old": ("mask", "stream", f"{T}.async_training.max_staleness=1"),
    f"{T}.async_training.in_flight_updates": ("false", "rollout_process"),
    f"{T}.async_training.recompute_kv": ("false", "rollout_process"),
    "max_turns": (1, "agent"),
    "do_search": ("false", "agent"),
}
TINY = [f"{A}.ppo_mini_batch_size=4", *(f"{block}.ppo_micro_batch_size_per_gpu=8" for block in (A, C))]
BASES = {
    "driver": [
        f"{M}.path={key_observers.BASE_MODEL}",
        "data.train_files={files}/train.parquet",
        "data.val_files={files}/train.parquet",
        "data.val_data_num=3",
        "data.train_batch_size=4",
        "data.max_prompt_length=1500",
        f"{R}.n_agent=2",
        f"{A}.ppo_mini_batch_size=8",
        "algorithm.adv_estimator=grpo",
        "algorithm.kl_ctrl.kl_coef=0",
        "retriever.max_failed_share=0.5",
        "trainer.total_training_steps=2",
        "trainer.progress=plain",
        "trainer.default_local_dir={out}/run",
    ],
    "actor": [f"{M}.path={{files}}/model", *TINY, f"{A}.optim.lr=0.01"],
    "critic": [f"{M}.path={{files}}/model", *TINY, f"{C}.optim.lr=0.01"],
    "judged": ["verifiers.judge.model=one"],
    "corpora": ["retriever.timeout=0.3"],  # nobody is there
    "patience": ["verifiers.cpu_seconds=0.5"],
    "environments": ["environment.env_class=key_observers:Observed"],
    "agent": [f"{R}.straggler_factor=null"],
    "engine": [f"{M}.path={{files}}/model"],
    "weights_sent": [
        f"{M}.path={{files}}/model",
        f"{R}.weight_transfer=delta",
        f"{T}.default_local_dir={{out}}/run",
    ],
    "vllm": [f"{M}.path={{files}}/model", f"{R}.max_num_seqs=100"],
}
ON_MODEL = [f"{M}.path={key_observers.BASE_MODEL}", "algorithm.kl_ctrl.kl_coef=0"]
ON_MODEL += [f"{A}.ppo_micro_batch_size_per_gpu=8", "algorithm.adv_estimator=grpo", f"{R}.n_agent=2"]
CHECKED = ["data.train_files={files}/train.parquet", "data.val_files={files}/train.parquet"]


def test_every_key_has_an_entry_and_no_other():
    assert set(EFFECTS) == set(settable(Config))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    key_observers.write_questions(folder)
    write_model(folder / "model")
    key_observers.write_other_model(folder / "model", folder / "other")
    return folder


@pytest.fixture(scope="module")
def observe(files, tmp_path_factory):
    """observe(observer, *settings): what it sees of a run with these; made once."""

    @cache
    def seen(observer: str, *settings: str):
        out = tmp_path_factory.mktemp("out")
        line = [*BASES.get(observer, [*ON_MODEL, *CHECKED]), *settings]
        config = load_config([text.format(files=files, out=out) for text in line])
        result = getattr(key_observers, observer)(copy.deepcopy(config))
        return str(result).replace(str(out), "OUT")

    return seen


@pytest.mark.parametrize("key", EFFECTS)
def test_changing_a_key_changes_what_the_run_does(key, observe):
    value, observer, *settings = EFFECTS[key]
    assert observe(observer, *settings, f"{key}={value}") != observe(observer, *settings)


@pytest.mark.parametrize("observer", sorted({entry[1] for entry in EFFECTS.values()}))
def test_the_same_settings_look_the_same(observer, observe, monkeypatch):
    """Otherwise a difference would prove nothing."""
    again = f"max_turns={load_config([]).max_turns}"  # another line, the same configuration
    assert observe(observer, again) == observe(observer)
