"""The keys that `ppo_megatron_trainer.yaml` has besides those of ppo_trainer.yaml: Search-R1's own.

The tables are those of `keys.py` and `limits.py`, with a few entries more; a test holds each key to them.
"""

from functools import partial

from verl.trainer.config.checks import KeyTables
from verl.trainer.config.keys import ACTOR, FIXED, NO_EFFECT, REF, ROLLOUT
from verl.trainer.config.limits import CHOICES, IMPORTABLE, NULLABLE, RANGES, TYPES
from verl.trainer.config.loading import load_config

CONFIG_NAME = "ppo_megatron_trainer"

_NEURAL = "Neural reward models are not in this version; give a function with custom_reward_function.path."
_START = "Training starts from the weights in the model's folder."
MORE_FIXED: dict[str, str] = {
    f"{ACTOR}.load_weight": _START,
    f"{REF}.load_weight": _START,
    "critic.load_weight": _START,
    **{
        f"critic.kl_ctrl.{key}": "The critic's loss has no KL; the policy's is algorithm.kl_ctrl."
        for key in ("type", "kl_coef")
    },
    **{
        f"reward_model.{key}": _NEURAL
        for key in (
            "load_weight",
            "param_offload",
            "megatron.tensor_model_parallel_size",
            "megatron.pipeline_model_parallel_size",
            "megatron.num_layers_per_virtual_pipeline_stage",
            "megatron.sequence_parallel",
            "megatron.seed",
        )
    },
}
MORE_NO_EFFECT: dict[str, str] = {
    f"{ROLLOUT}.layer_name_map.{key}": "weights reach every engine under Hugging Face's names."
    for key in ("qkv_layer_name", "gate_proj_layer_name")
}
# key -> the key of ppo_trainer.yaml whose default it is
ALIASES: dict[str, str] = {
    f"{ACTOR}.optim.clip_grad": f"{ACTOR}.grad_clip",
    "critic.optim.clip_grad": "critic.grad_clip",
    f"{REF}.param_offload": f"{REF}.fsdp_config.param_offload",
}


def megatron_tables(follows: dict[str, str]) -> KeyTables:
    """The tables of this file's keys and of all others; follows: as for ppo_trainer.yaml."""
    return KeyTables(
        partial(load_config, config_name=CONFIG_NAME),
        {**NULLABLE, "reward_model.megatron.num_layers_per_virtual_pipeline_stage": (int,)},
        CHOICES,
        {**RANGES, **{key: RANGES[alias] for key, alias in ALIASES.items() if alias in RANGES}},
        {**FIXED, **MORE_FIXED},
        {**NO_EFFECT, **MORE_NO_EFFECT},
        follows,
        TYPES,
        IMPORTABLE,
    )
