"""Finds a user's mistakes in a configuration before anything starts.

Each check raises ValueError with what was found, what was expected and what to do. Types follow the
defaults in `ppo_trainer.yaml`; choices and ranges are tables (`checks.py`); what one key means for another
is a function each.
"""

import importlib.util
import shutil
import subprocess
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from verl.trainer.config.algorithm_checks import check_algorithm
from verl.trainer.config.checks import (
    KeyTables,
    as_list,
    check_adapters,
    check_betas,
    check_loggers,
    check_model,
    check_parquet,
    check_processes,
    check_resume,
)
from verl.trainer.config.keys import ACTOR, FIXED, NO_EFFECT, ROLLOUT
from verl.trainer.config.layout_checks import check_layout
from verl.trainer.config.limits import CHOICES, IMPORTABLE, NULLABLE, RANGES, TYPES
from verl.trainer.config.loading import CONFIG_NAME, flat, load_config
from verl.trainer.config.loss_settings import unread_settings, unusual_aggregation
from verl.trainer.config.megatron_checks import check_megatron, without_effect
from verl.trainer.config.megatron_keys import CONFIG_NAME as MEGATRON_CONFIG_NAME
from verl.trainer.config.megatron_keys import megatron_tables
from verl.trainer.ppo.passes import Passes

FORMAT_SCORES = ("structure_format_score", "final_format_score", "retrieval_score")
VAL_MODES = ("greedy", "sampled")


def validate(config: DictConfig, *, format_reward: bool = False, config_name: str = CONFIG_NAME) -> None:
    """Check a configuration made by `load_config`; returns silently when it can run.

    Args:
        config: a resolved configuration.
        format_reward: the program is `main_ppo_format`, which reads the format scores.
        config_name: the file that the configuration is of, one of those in `TABLES_OF`.

    Raises:
        ValueError: the first mistake found.
    """
    TABLES_OF[config_name].check(flat(config))
    passes = Passes.of(config)
    _check_lengths(config)
    _check_batches(config, passes)
    _check_rollout(config)
    check_algorithm(config, passes)
    _check_algorithm(config)
    check_adapters("actor_rollout_ref.model", config.actor_rollout_ref.model)
    check_adapters("critic.model", config.critic.model)
    _check_reference(config)
    _check_kl_and_entropy(config)
    _check_rollout_correction(config)
    _check_format_scores(config, format_reward)
    _check_lists(config)
    _check_files(config, passes)
    check_resume(config.trainer)
    check_processes(config.trainer)
    _check_rollout_pool(config)
    check_layout(config, passes)
    check_megatron(config, passes)
    _check_vllm_is_there(config.actor_rollout_ref.rollout)


def settings_without_effect(config: DictConfig, config_name: str = CONFIG_NAME) -> list[str]:
    """A line for each key that is set to something else than its default and has no meaning here, and for an
    aggregation that the loss is not meant for.
    """
    more = unread_settings(config) | without_effect(config) | _without_ray(config.trainer)
    if config.actor_rollout_ref.rollout.placement == "colocated":
        more[f"{ROLLOUT}.tensor_model_parallel_size"] = (
            f"each process has an engine with the whole model; {ROLLOUT}.placement=apart splits it."
        )
    return [*TABLES_OF[config_name].without_effect(config, more), *unusual_aggregation(config)]


def _without_ray(trainer: DictConfig) -> dict[str, str]:
    """key -> why it changes nothing in a run of one process, which is the program's own."""
    apart = trainer.rollout_pool.n_gpus_per_node is not None
    has_one_process = trainer.nnodes * trainer.n_gpus_per_node == 1 and not apart
    if trainer.backend == "local" or (trainer.backend == "auto" and has_one_process):
        why = "the run is one process without Ray, and what ends it ends the run. Set trainer.backend=ray."
        return dict.fromkeys(("trainer.max_restarts", "trainer.restart_timeout"), why)
    return {}


# Keys whose default is another key's value, among those that may not be changed alone.
FOLLOWS = {
    "actor_rollout_ref.ref.ulysses_sequence_parallel_size": (
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size"
    ),
    **{
        f"{block}.megatron.{size}": f"{ACTOR}.megatron.{size}"
        for block in ("actor_rollout_ref.ref", "critic")
        for size in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    },
    "actor_rollout_ref.rollout.prompt_length": "data.max_prompt_length",
    "actor_rollout_ref.rollout.response_length": "data.max_response_length",
    "critic.model.tokenizer_path": "actor_rollout_ref.model.path",
    "reward_model.model.input_tokenizer": "actor_rollout_ref.model.path",
    "reward_model.model.external_lib": "actor_rollout_ref.model.external_lib",
    "reward_model.use_dynamic_bsz": "critic.use_dynamic_bsz",
    "reward_model.forward_max_token_len_per_gpu": "critic.forward_max_token_len_per_gpu",
}
TABLES = KeyTables(load_config, NULLABLE, CHOICES, RANGES, FIXED, NO_EFFECT, FOLLOWS, TYPES, IMPORTABLE)
TABLES_OF = {CONFIG_NAME: TABLES, MEGATRON_CONFIG_NAME: megatron_tables(FOLLOWS)}


def _check_lengths(config: DictConfig) -> None:
    data = config.data
    if data.max_start_length >= data.max_prompt_length:
        raise ValueError(
            f"Found data.max_start_length={data.max_start_length} and data.max_prompt_length="
            f"{data.max_prompt_length}; expected the first to be smaller: max_prompt_length bounds the "
            "whole context, the prompt and everything after it. A good value is max_start_length + "
            "max_response_length * (max_turns + 1) + max_obs_length * max_turns."
        )


def _check_batches(config: DictConfig, passes: Passes) -> None:
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    group = rollout.n * rollout.n_agent
    rows = config.data.train_batch_size * group
    blocks = [("actor_rollout_ref.actor", actor)]
    if passes.values:
        blocks.append(("critic", config.critic))
    for name, block in blocks:
        mini = block.ppo_mini_batch_size * rollout.n
        if mini > rows and not config.trainer.val_only:
            raise ValueError(
                f"Found {name}.ppo_mini_batch_size={block.ppo_mini_batch_size} (times rollout.n = {mini} "
                f"trajectories), but a step has {rows} (data.train_batch_size={config.data.train_batch_size}"
                f" times a group of {group}); expected at most {rows // rollout.n}."
            )
    for name, kind in (
        ("actor_rollout_ref.actor", "ppo"),
        ("actor_rollout_ref.ref", "log_prob"),
        ("actor_rollout_ref.rollout", "log_prob"),
        ("critic", "ppo"),
        ("critic", "forward"),
    ):
        block = OmegaConf.select(config, name)
        dynamic = block.log_prob_use_dynamic_bsz if kind == "log_prob" else block.use_dynamic_bsz
        if block[f"{kind}_micro_batch_size_per_gpu"] is None and not dynamic:
            raise ValueError(
                f"Found no {name}.{kind}_micro_batch_size and no {kind}_micro_batch_size_per_gpu; expected "
                "one of them, or dynamic batch sizes (use_dynamic_bsz)."
            )


def _check_rollout(config: DictConfig) -> None:
    """What one key of the rollout means for another."""
    rollout, vllm = config.actor_rollout_ref.rollout, config.actor_rollout_ref.rollout.vllm
    apart = rollout.placement == "apart"
    if apart and rollout.name != "vllm":
        raise ValueError(
            f"Found {ROLLOUT}.placement=apart with {ROLLOUT}.name={rollout.name}, which runs inside of the "
            f"trainer; expected {ROLLOUT}.name=vllm, or {ROLLOUT}.placement=colocated."
        )
    if rollout.tensor_model_parallel_size > 1 and rollout.name != "vllm":
        raise ValueError(
            f"Found {ROLLOUT}.tensor_model_parallel_size={rollout.tensor_model_parallel_size} with "
            f"{ROLLOUT}.name={rollout.name}, which keeps a whole model in each process; expected 1, or "
            f"{ROLLOUT}.name=vllm."
        )
    for key in ("python", "num_servers", "server_urls", "weight_transfer"):
        if not apart and vllm[key] != TABLES.defaults[f"{ROLLOUT}.vllm.{key}"]:
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
    if vllm.weight_transfer == "nccl" and config.trainer.device == "cpu":
        raise ValueError(
            f"Found {ROLLOUT}.vllm.weight_transfer=nccl with trainer.device=cpu; expected gloo, disk or auto."
        )
    if rollout.keep_partial and rollout.straggler_factor is None:
        raise ValueError(
            f"Found {ROLLOUT}.keep_partial=true without {ROLLOUT}.straggler_factor, so no group is ever cut; "
            f"expected both. Set for example {ROLLOUT}.straggler_factor=4."
        )


def _check_rollout_pool(config: DictConfig) -> None:
    """Processes of their own for the rollout: what else that asks for."""
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    pool = trainer.rollout_pool
    if pool.n_gpus_per_node is None:
        if pool.nnodes != 1:
            raise ValueError(
                f"Found trainer.rollout_pool.nnodes={pool.nnodes} without n_gpus_per_node, the processes "
                "on each of these machines; expected both. Set for example "
                "trainer.rollout_pool.n_gpus_per_node=8."
            )
        return
    if rollout.placement == "apart":
        raise ValueError(
            f"Found trainer.rollout_pool with {ROLLOUT}.placement=apart: vLLM's servers are processes of "
            f"their own already; expected {ROLLOUT}.placement=colocated (with the pool's processes), or "
            "trainer.rollout_pool.n_gpus_per_node=null."
        )
    if trainer.backend == "local":
        raise ValueError(
            "Found trainer.backend=local with trainer.rollout_pool; expected trainer.backend=ray or auto."
        )
    if trainer.val_only is True:
        raise ValueError(
            "Found trainer.val_only=true with trainer.rollout_pool: nothing is trained beside the rollout; "
            "expected trainer.rollout_pool.n_gpus_per_node=null."
        )


_INSTALL_VLLM = "`pip install vllm` (without a GPU: `bash scripts/test_vllm.sh` installs its CPU build)"


def _check_vllm_is_there(rollout: DictConfig) -> None:
    """That the interpreter which is to run vLLM has it: this one, or the one for servers to start."""
    python = rollout.vllm.python
    if rollout.name != "vllm" or rollout.vllm.server_urls is not None:
        return
    if python is None:
        spec = importlib.util.find_spec("vllm")
        if spec is None or spec.origin is None:  # no origin: a mere folder of that name on the path
            other = f"{ROLLOUT}.name=native" if rollout.placement == "colocated" else f"{ROLLOUT}.vllm.python"
            raise ValueError(
                f"Found {ROLLOUT}.name=vllm, but vLLM is not installed for this interpreter; run "
                f"{_INSTALL_VLLM}, or set {other}."
            )
    elif shutil.which(python) is None:
        raise ValueError(f"Found no interpreter at {ROLLOUT}.vllm.python={python}; expected one with vLLM.")
    else:
        code = "import sys, importlib.util as u; sys.exit(not u.find_spec('vllm'))"
        found = subprocess.run([python, "-c", code], cwd="/", capture_output=True, timeout=60, check=False)
        if found.returncode != 0:
            raise ValueError(
                f"Found {ROLLOUT}.vllm.python={python}, but vLLM is not installed there; run {_INSTALL_VLLM} "
                "with that interpreter's pip."
            )


def _check_reference(config: DictConfig) -> None:
    every, actor = config.actor_rollout_ref.ref.reset_every, config.actor_rollout_ref.actor
    uses_kl = (actor.kl_loss_coef if actor.use_kl_loss else config.algorithm.kl_ctrl.kl_coef) > 0
    if every is not None and not uses_kl:
        raise ValueError(
            f"Found actor_rollout_ref.ref.reset_every={every}, but no KL to a reference is asked for; "
            "expected null, or actor.use_kl_loss=true with actor.kl_loss_coef above 0."
        )


def _check_algorithm(config: DictConfig) -> None:
    control = config.algorithm.kl_ctrl
    if control.type == "adaptive" and (control.target_kl is None or control.horizon is None):
        raise ValueError(
            f"Found algorithm.kl_ctrl.type=adaptive with target_kl={control.target_kl} and horizon="
            f"{control.horizon}; expected both. Set for example algorithm.kl_ctrl.target_kl=0.1 "
            "algorithm.kl_ctrl.horizon=10000."
        )
    for name in ("actor_rollout_ref.actor", "critic"):
        check_betas(f"{name}.optim.betas", OmegaConf.select(config, f"{name}.optim.betas"))


def _check_kl_and_entropy(config: DictConfig) -> None:
    actor = config.actor_rollout_ref.actor
    if actor.use_kl_loss and actor.kl_loss_coef > 0 and actor.kl_loss_type in ("kl", "k1"):
        raise ValueError(
            f"Found {ACTOR}.kl_loss_type={actor.kl_loss_type} in the loss, where its gradient is 0 on "
            "average: it adds noise and holds nothing; expected k2, or k1+ (the same value with k2's "
            f"gradient). In the reward ({ACTOR}.use_kl_loss=false algorithm.kl_penalty=k1) k1 is right."
        )
    control = actor.entropy_ctrl
    if control.type == "adaptive":
        if control.target_entropy is None:
            raise ValueError(
                f"Found {ACTOR}.entropy_ctrl.type=adaptive without target_entropy; expected the entropy "
                f"(nats per token) to stay above. Set for example {ACTOR}.entropy_ctrl.target_entropy=0.2."
            )
        if not control.min_coeff <= actor.entropy_coeff <= control.max_coeff:
            raise ValueError(
                f"Found {ACTOR}.entropy_coeff={actor.entropy_coeff}, where the adaptive weight starts; "
                f"expected a number from entropy_ctrl.min_coeff={control.min_coeff} to max_coeff="
                f"{control.max_coeff}."
            )
    elif control.target_entropy is not None:
        raise ValueError(
            f"Found {ACTOR}.entropy_ctrl.target_entropy={control.target_entropy} with a fixed weight; "
            f"expected {ACTOR}.entropy_ctrl.type=adaptive."
        )


def _check_rollout_correction(config: DictConfig) -> None:
    prefix, correction = "algorithm.rollout_correction", config.algorithm.rollout_correction
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


def _check_format_scores(config: DictConfig, format_reward: bool) -> None:
    if format_reward and config.custom_reward_function.path is not None:
        raise ValueError(
            "Found custom_reward_function.path in main_ppo_format, which has a reward of its own; "
            "run `python -m verl.trainer.main_ppo` with it."
        )
    for name in FORMAT_SCORES:
        value = config.reward_model[name]
        if value and not format_reward:
            raise ValueError(
                f"Found reward_model.{name}={value}, but this program scores exact match alone; "
                "run `python -m verl.trainer.main_ppo_format` for the format reward."
            )


def _check_lists(config: DictConfig) -> None:
    modes = list(config.trainer.val_modes)
    if not modes or any(mode not in VAL_MODES for mode in modes):
        raise ValueError(f"Found trainer.val_modes={modes}; expected one or both of {list(VAL_MODES)}.")
    check_loggers(config.trainer.logger)


def _check_files(config: DictConfig, passes: Passes) -> None:
    file_keys = ["data.train_files", "data.val_files"]
    if config.data.extra_val_files is not None:
        file_keys.append("data.extra_val_files")
    if config.trainer.dry_run:  # for another machine, perhaps, where the data is
        file_keys = []
    for key in file_keys:
        check_parquet(config, key)
    model_keys = ["actor_rollout_ref.model.path"]
    if passes.values:
        model_keys.append("critic.model.path")
    if passes.teacher:
        model_keys.append("actor_rollout_ref.teacher.path")
    for key in model_keys:
        check_model(key, OmegaConf.select(config, key))
    path = config.custom_reward_function.path
    if path is not None and not Path(path).is_file():
        raise ValueError(f"Found no file at custom_reward_function.path={path}; expected a python file.")
