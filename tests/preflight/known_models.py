"""config.json of models as they are published (Qwen2.5), and of small ones; no weights."""

import json
from pathlib import Path

from transformers import Qwen2Config

QWEN_2_5 = {
    "architectures": ["Qwen2ForCausalLM"],
    "max_position_embeddings": 131072,
    "model_type": "qwen2",
    "tie_word_embeddings": False,
    "vocab_size": 152064,
}
_SHAPES = {  # hidden size, width of the MLP, heads, layers, key and value heads
    "3B": (2048, 11008, 16, 36, 2),
    "7B": (3584, 18944, 28, 28, 4),
    "32B": (5120, 27648, 40, 64, 8),
    "72B": (8192, 29568, 64, 80, 8),
}
_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
)
SIZES = {size: dict(zip(_FIELDS, shape, strict=True)) for size, shape in _SHAPES.items()}
SIZES["3B"] |= {"tie_word_embeddings": True, "vocab_size": 151936}
# as on their model cards: 3.09 B, 7.61 B, 32.8 B, 72.7 B
NUM_PARAMETERS = {
    "3B": 3_085_938_688,
    "7B": 7_615_616_512,
    "32B": 32_763_876_352,
    "72B": 72_706_203_648,
}


def write_config(folder: Path, size: str) -> Path:
    """A model folder that holds a config.json and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(QWEN_2_5 | SIZES[size]))
    return folder


def write_small(folder: Path, **fields: object) -> Path:
    """A small Qwen2's config.json."""
    shape = {
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 101,
        "tie_word_embeddings": False,
    }
    Qwen2Config(**shape | fields, architectures=["Qwen2ForCausalLM"]).save_pretrained(folder)
    return folder


def search_r1_settings(folder: Path, estimator: str) -> list[str]:
    """What Search-R1's scripts set for a real model, as far as memory is concerned: whole batches of rows."""
    return [
        f"actor_rollout_ref.model.path={folder}",
        f"critic.model.path={folder}",
        f"algorithm.adv_estimator={estimator}",
        "data.train_batch_size=512",
        "data.val_batch_size=256",
        "data.max_prompt_length=4096",
        "data.max_start_length=2048",
        "actor_rollout_ref.model.enable_gradient_checkpointing=true",
        "critic.model.enable_gradient_checkpointing=true",
        "actor_rollout_ref.actor.ppo_mini_batch_size=256",
        "actor_rollout_ref.actor.ppo_micro_batch_size=64",
        "critic.ppo_micro_batch_size=8",
        *(["actor_rollout_ref.rollout.n_agent=5"] if estimator == "grpo" else []),
    ]
