"""A user's mistakes that the schema can't see: files that are not there, and keys that contradict each other.

Each raises ValueError with what was found, what was expected and what to do. Nothing here needs torch; what
asks the estimator or the loss is in `verl.trainer.config.validation`.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl.config.blocks import Model, RunSettings
from verl.config.keys import as_list, at, check_values
from verl.config.policy import ACTOR, ROLLOUT, Vllm
from verl.config.schema import LOGGERS, VAL_MODES, Config
from verl.config.sft import SFTConfig

FORMAT_SCORES = ("structure_format_score", "final_format_score", "retrieval_score")
_INSTALL_VLLM = "`pip install vllm` (without a GPU: `bash scripts/test_vllm.sh` installs its CPU build)"
_FOR_SERVERS = ("python", "num_servers", "server_urls")


def check_config(config: Config, *, format_reward: bool | None = None, with_data: bool = True) -> None:
    """Everything about a configuration of reinforcement learning that can be said at once.

    format_reward: the program is `main_ppo_format`, which reads the format scores; None: it may be.
    with_data: the files of rows have to be there.
    """
    check_values(config)
    _check_data(config, with_data and not config.trainer.dry_run)
    _check_rollout(config)
    _check_losses(config)
    _check_rewards(config, format_reward)
    for name in ("actor_rollout_ref.model", "critic.model"):
        check_adapters(name, at(config, name))
    for name in (ACTOR, "critic"):
        check_betas(f"{name}.optim.betas", at(config, name).optim.betas)
    modes = config.trainer.val_modes
    if not modes or any(mode not in VAL_MODES for mode in modes):
        raise ValueError(f"Found trainer.val_modes={modes}; expected one or both of {list(VAL_MODES)}.")
    check_run(config.trainer)
    check_layout(config)
    check_model("actor_rollout_ref.model.path", config.actor_rollout_ref.model.path)


def check_sft_config(config: SFTConfig, *, with_data: bool = True) -> None:
    """A configuration of supervised training. with_data: as above."""
    check_values(config)
    check_betas("optim.betas", config.optim.betas)
    if with_data:
        check_parquet("data.train_files", config.data.train_files)
    if config.data.val_files is not None:
        check_parquet("data.val_files", config.data.val_files)
    elif config.trainer.test_freq > 0 and with_data:
        raise ValueError(
            f"Found trainer.test_freq={config.trainer.test_freq} without data.val_files; expected both or "
            "none."
        )
    check_model("model.partial_pretrain", config.model.partial_pretrain)
    check_adapters("model", config.model)
    if config.data.multiturn.enable and config.data.segments_key is not None:
        raise ValueError(
            f"Found data.multiturn.enable=true and data.segments_key={config.data.segments_key}, two forms "
            "of rows; expected one of them."
        )
    check_run(config.trainer)


def check_run(trainer: RunSettings) -> None:
    """Loggers, the checkpoint to go on from, and the number of processes."""
    for name in trainer.logger:
        if name not in LOGGERS:
            raise ValueError(f"Found {name!r} in trainer.logger; expected any of: {', '.join(LOGGERS)}.")
        if name != "console" and importlib.util.find_spec(name) is None:
            raise ValueError(
                f"Found {name!r} in trainer.logger, but the package is not installed; "
                f"run `pip install {name}` or leave it out."
            )
    path = trainer.resume_from_path
    if trainer.resume_mode != "from_path" and path is not None:
        raise ValueError(
            f"Found trainer.resume_from_path={path} with trainer.resume_mode={trainer.resume_mode}; expected "
            "resume_mode=from_path."
        )
    if trainer.resume_mode == "from_path" and (path is None or not Path(path).is_dir()):
        raise ValueError(
            f"Found trainer.resume_from_path={path}, not a folder; expected the folder of one step, such as "
            "<default_local_dir>/global_step_100."
        )
    processes = trainer.nnodes * trainer.n_gpus_per_node
    if trainer.backend == "local" and processes > 1:
        raise ValueError(
            f"Found trainer.backend=local with {processes} processes; expected trainer.backend=ray, or "
            "trainer.nnodes=1 trainer.n_gpus_per_node=1."
        )


def check_betas(key: str, betas: Sequence[Any]) -> None:
    """AdamW's two decay rates."""
    if len(betas) != 2 or not all(isinstance(beta, float | int) and 0 <= beta < 1 for beta in betas):
        raise ValueError(f"Found {key}={betas}; expected two numbers in [0, 1).")


def check_parquet(key: str, files: str | list[str] | None) -> None:
    """A key that names a parquet file, or a list of them."""
    for path in as_list(files):
        if path is None:
            raise ValueError(f"Found no {key}; expected a parquet file. Set {key}=<path>.parquet.")
        if not Path(path).is_file():
            raise ValueError(f"Found no file at {key}={path}; expected a parquet file.")


def check_model(key: str, path: str | None) -> None:
    """A folder with a config.json, or the name of a model on the Hugging Face hub (`owner/name`)."""
    if path is None:
        raise ValueError(f"Found no {key}; expected a Hugging Face model folder. Set {key}=<folder>.")
    folder = Path(path)
    looks_like_hub_name = path.count("/") == 1 and path[0] not in "./" and not folder.parent.is_dir()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            is_adapter = (folder / "adapter_config.json").is_file()
            hint = " A LoRA adapter goes into model.lora_adapter_path." if is_adapter else ""
            raise ValueError(
                f"Found {key}={path} without a config.json; expected a Hugging Face folder.{hint}"
            )
    elif not looks_like_hub_name:
        raise ValueError(
            f"Found no folder at {key}={path}; expected a Hugging Face model folder, or a model's name "
            "on the hub such as Qwen/Qwen2.5-3B."
        )


def check_adapters(key: str, model: Model) -> None:
    """LoRA in the model block `key`: its package is installed, and an adapter to go on from is there."""
    path = getattr(model, "lora_adapter_path", None)  # a critic starts with new adapters
    if path is not None and not (Path(path) / "adapter_config.json").is_file():
        raise ValueError(
            f"Found no adapter_config.json at {key}.lora_adapter_path={path}; expected the folder of a PEFT "
            "adapter, such as <default_local_dir>/global_step_100/actor/adapter."
        )
    if (path is not None or model.lora_rank > 0) and importlib.util.find_spec("peft") is None:
        raise ValueError(
            f"Found {key}.lora_rank or lora_adapter_path, but the package peft is not installed; run "
            "`pip install peft`, or set lora_rank=0."
        )


def _check_data(config: Config, with_files: bool) -> None:
    data, pools = config.data, config.data.difficulty_pools
    if data.max_start_length >= data.max_prompt_length:
        raise ValueError(
            f"Found data.max_start_length={data.max_start_length} and data.max_prompt_length="
            f"{data.max_prompt_length}; expected the first to be smaller: max_prompt_length bounds the "
            "whole context, the prompt and everything after it. A good value is max_start_length + "
            "max_response_length * (max_turns + 1) + max_obs_length * max_turns."
        )
    if pools.easy_share + pools.hard_share > 1:
        raise ValueError(
            f"Found data.difficulty_pools.easy_share={pools.easy_share} and hard_share={pools.hard_share}; "
            "expected at most 1 together."
        )
    if not with_files:  # not made yet, or on another machine
        return
    for key in ("train_files", "val_files", "extra_val_files"):
        if key != "extra_val_files" or data.extra_val_files is not None:
            check_parquet(f"data.{key}", data[key])


def _check_rollout(config: Config) -> None:
    """What one key of the rollout means for another."""
    rollout, vllm = config.actor_rollout_ref.rollout, config.actor_rollout_ref.rollout.vllm
    apart = rollout.placement == "apart"
    if apart and rollout.name == "native":
        raise ValueError(
            f"Found {ROLLOUT}.placement=apart with {ROLLOUT}.name={rollout.name}, which runs inside of the "
            f"trainer; expected {ROLLOUT}.name=vllm, or {ROLLOUT}.placement=colocated."
        )
    if rollout.tensor_model_parallel_size > 1 and rollout.name == "native":
        raise ValueError(
            f"Found {ROLLOUT}.tensor_model_parallel_size={rollout.tensor_model_parallel_size} with "
            f"{ROLLOUT}.name={rollout.name}, which keeps a whole model in each process; expected 1, or "
            f"{ROLLOUT}.name=vllm."
        )
    usual = Vllm()
    for key in _FOR_SERVERS:
        if not apart and vllm[key] != usual[key]:
            raise ValueError(
                f"Found {ROLLOUT}.vllm.{key}={vllm[key]}, which is for servers, with {ROLLOUT}.placement="
                f"{rollout.placement}; expected {ROLLOUT}.name=vllm {ROLLOUT}.placement=apart."
            )
    if vllm.server_urls is not None and (vllm.python is not None or vllm.num_servers != 1):
        raise ValueError(
            f"Found {ROLLOUT}.vllm.server_urls, servers that run already, with vllm.python={vllm.python} and "
            f"vllm.num_servers={vllm.num_servers}, which are for servers to start; expected one or the other."
        )
    for url in as_list(vllm.server_urls):
        if url is not None and not str(url).startswith(("http://", "https://")):
            raise ValueError(f"Found {ROLLOUT}.vllm.server_urls={url}; expected http://host:port.")
    if rollout.keep_partial and rollout.straggler_factor is None:
        raise ValueError(
            f"Found {ROLLOUT}.keep_partial=true without {ROLLOUT}.straggler_factor, so no group is ever cut; "
            f"expected both. Set for example {ROLLOUT}.straggler_factor=4."
        )


def check_vllm_is_there(config: Config) -> None:
    """That the interpreter which is to run vLLM has it: this one, or the one for servers to start."""
    rollout = config.actor_rollout_ref.rollout
    python = rollout.vllm.python
    wanted = rollout.name == "vllm" or (rollout.name == "auto" and rollout.placement == "apart")
    if not wanted or rollout.vllm.server_urls is not None:
        return
    if python is None:
        spec = importlib.util.find_spec("vllm")
        if spec is None or spec.origin is None:  # no origin: a mere folder of that name on the path
            other = f"{ROLLOUT}.name=native" if rollout.placement == "colocated" else f"{ROLLOUT}.vllm.python"
            raise ValueError(
                f"Found {ROLLOUT}.name={rollout.name}, but vLLM is not installed for this interpreter; run "
                f"{_INSTALL_VLLM}, or set {other}."
            )
    elif shutil.which(python) is None:
        raise ValueError(f"Found no interpreter at {ROLLOUT}.vllm.python={python}; expected one with vLLM.")
    else:
        code = "import sys, importlib.util as u; sys.exit(not u.find_spec('vllm'))"
        answer = subprocess.run([python, "-c", code], cwd="/", capture_output=True, timeout=60, check=False)
        if answer.returncode != 0:
            raise ValueError(
                f"Found {ROLLOUT}.vllm.python={python}, but vLLM is not installed there; run {_INSTALL_VLLM} "
                "with that interpreter's pip."
            )


def _check_losses(config: Config) -> None:
    """KL, entropy and rollout correction."""
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    every = config.actor_rollout_ref.ref.reset_every
    uses_kl = (actor.kl_loss_coef if actor.use_kl_loss else algorithm.kl_ctrl.kl_coef) > 0
    if every is not None and not uses_kl:
        raise ValueError(
            f"Found actor_rollout_ref.ref.reset_every={every}, but no KL to a reference is asked for; "
            "expected null, or actor.use_kl_loss=true with actor.kl_loss_coef above 0."
        )
    control = algorithm.kl_ctrl
    if control.type == "adaptive" and (control.target_kl is None or control.horizon is None):
        raise ValueError(
            f"Found algorithm.kl_ctrl.type=adaptive with target_kl={control.target_kl} and horizon="
            f"{control.horizon}; expected both. Set for example algorithm.kl_ctrl.target_kl=0.1 "
            "algorithm.kl_ctrl.horizon=10000."
        )
    if actor.use_kl_loss and actor.kl_loss_coef > 0 and actor.kl_loss_type in ("kl", "k1"):
        raise ValueError(
            f"Found {ACTOR}.kl_loss_type={actor.kl_loss_type} in the loss, where its gradient is 0 on "
            "average: it adds noise and holds nothing; expected k2, or k1+ (the same value with k2's "
            f"gradient). In the reward ({ACTOR}.use_kl_loss=false algorithm.kl_penalty=k1) k1 is right."
        )
    entropy = actor.entropy_ctrl
    if entropy.target_entropy is not None and not 0 <= actor.entropy_coeff <= entropy.max_coeff:
        raise ValueError(
            f"Found {ACTOR}.entropy_coeff={actor.entropy_coeff}, where the adaptive weight starts; expected "
            f"a number from 0 to entropy_ctrl.max_coeff={entropy.max_coeff}."
        )
    prefix, correction = "algorithm.rollout_correction", algorithm.rollout_correction
    if correction.bypass_mode and (correction.rollout_is or correction.rollout_rs):
        raise ValueError(
            f"Found {prefix}.bypass_mode=true with rollout_is={correction.rollout_is} and rollout_rs="
            f"{correction.rollout_rs}; expected one or the other: with bypass_mode the policy loss has the "
            "ratio of the trainer to the rollout engine already, and there is nothing to compare it with."
        )
    if (correction.rollout_rs is None) != (correction.rollout_rs_threshold is None):
        raise ValueError(
            f"Found {prefix}.rollout_rs={correction.rollout_rs} with rollout_rs_threshold="
            f"{correction.rollout_rs_threshold}; expected both or none, for example {prefix}.rollout_rs="
            f"token {prefix}.rollout_rs_threshold=2.0."
        )
    if correction.rollout_is_batch_normalize and correction.rollout_is is None:
        raise ValueError(
            f"Found {prefix}.rollout_is_batch_normalize=true without weights; expected {prefix}.rollout_is="
            "token or sequence."
        )


def _check_rewards(config: Config, format_reward: bool | None) -> None:
    path, buffer, longest = (
        config.custom_reward_function.path,
        config.reward_model.overlong_buffer,
        config.data.max_response_length,
    )
    if path is not None and not Path(path).is_file():
        raise ValueError(f"Found no file at custom_reward_function.path={path}; expected a python file.")
    if format_reward and path is not None:
        raise ValueError(
            "Found custom_reward_function.path in main_ppo_format, which has a reward of its own; "
            "run `python -m verl.trainer.main_ppo` with it."
        )
    for name in FORMAT_SCORES:
        value = config.reward_model[name]
        if value and format_reward is False:
            raise ValueError(
                f"Found reward_model.{name}={value}, but this program scores exact match alone; "
                "run `python -m verl.trainer.main_ppo_format` for the format reward."
            )
    if buffer.enable and buffer.len >= longest:
        raise ValueError(
            f"Found reward_model.overlong_buffer.len={buffer.len} with data.max_response_length={longest}, "
            "so that every last turn would be near its limit; expected less, for example "
            f"{max(1, longest // 4)}."
        )


def check_layout(config: Config) -> None:
    """fsdp_size and ulysses_sequence_parallel_size against the number of processes."""
    actor, num_processes = (
        config.actor_rollout_ref.actor,
        config.trainer.nnodes * config.trainer.n_gpus_per_node,
    )
    key, size = f"{ACTOR}.fsdp_config.fsdp_size", actor.fsdp_config.fsdp_size
    if actor.strategy == "megatron":
        if size != -1:
            raise ValueError(
                f"Found {key}={size} with {ACTOR}.strategy=megatron, which does not shard weights so; "
                f"expected -1, or {ACTOR}.strategy=fsdp."
            )
        return
    check_divides(key, -1 if size >= num_processes else size, num_processes)
    sharing = actor.ulysses_sequence_parallel_size
    check_divides(f"{ACTOR}.ulysses_sequence_parallel_size", sharing, num_processes)


def check_divides(name: str, size: int, num_processes: int) -> None:
    """Raises ValueError unless the key `name`'s value (-1: all) divides the number of processes."""
    if size != -1 and (size < 1 or num_processes % size):
        raise ValueError(
            f"Found {name}={size} with {num_processes} processes (trainer.nnodes * trainer.n_gpus_per_node); "
            "expected a number that divides them."
        )
