"""A tiny model folder, batches, configurations and engines for tests of training; importable from child
processes.
"""

import warnings
from functools import cache
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, Gemma3TextConfig, PreTrainedTokenizerFast, Qwen3Config

from verl.config import Config, load_config
from verl.protocol import DataProto
from verl.workers.actor.dp_actor import DataParallelPPOActor
from verl.workers.critic.dp_critic import DataParallelPPOCritic
from verl.workers.engine.fsdp_engine import TrainEngine
from verl.workers.engine.loading import Precision, load_policy, load_value_model
from verl.workers.engine.update_loop import MicroBatchLimits

VOCABULARY = 40
CPU = torch.device("cpu")


SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
GEMMA3 = {  # heads wider than hidden / heads, four to one of keys; windows shorter than the trajectories
    "num_hidden_layers": 3,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "query_pre_attn_scalar": 12,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "bos_token_id": None,
    "eos_token_id": 1,
}


def write_model(folder, tied=True, kind="qwen3"):
    """A random model of two layers (kind: qwen3, or gemma3 of three) with a tokenizer of one token per digit
    string, as a Hugging Face folder.
    """
    torch.manual_seed(0)
    sizes = SIZES | {"tie_word_embeddings": tied}
    config = Gemma3TextConfig(**sizes | GEMMA3) if kind == "gemma3" else Qwen3Config(**sizes)
    model = AutoModelForCausalLM.from_config(config)
    if kind == "gemma3":  # its norms begin at weight 0, which many mistakes would not show at
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({str(i): i for i in range(VOCABULARY)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="1", unk_token="0").save_pretrained(folder)
    (Path(folder) / "prompt_template.txt").write_text("Question: {question}\n")
    return str(folder)


@cache  # reading takes a third of a second, and most tests want the same few
def make_config(model_path, *overrides) -> Config:
    """The run's configuration with small batches: 8 rows a mini-batch, 8 a micro-batch, packed."""
    return load_config(
        [
            f"actor_rollout_ref.model.path={model_path}",
            "actor_rollout_ref.model.use_remove_padding=true",
            "actor_rollout_ref.actor.ppo_mini_batch_size=8",
            "actor_rollout_ref.actor.ppo_micro_batch_size=8",
            "critic.ppo_micro_batch_size=8",
            "actor_rollout_ref.actor.entropy_coeff=0.01",
            "actor_rollout_ref.actor.optim.lr=0.01",
            *overrides,
        ]
    )


def make_batch(num_rows=8, seed=0, pad_id=0, shift=0.5) -> DataProto:
    """Random trajectories with an observation in the middle; row 3 sampled nothing. Old log-probs are off
    by `shift`.
    """
    generator = torch.Generator().manual_seed(seed)
    prompt_width = 5
    response_width = 14
    attention = torch.zeros(num_rows, prompt_width + response_width, dtype=torch.int64)
    response_mask = torch.zeros(num_rows, response_width, dtype=torch.int64)
    for row in range(num_rows):
        prompt = int(torch.randint(1, prompt_width + 1, (1,), generator=generator))
        response = int(torch.randint(6, response_width + 1, (1,), generator=generator))
        attention[row, prompt_width - prompt : prompt_width + response] = 1
        response_mask[row, :response] = 1
        response_mask[row, 2:5] = 0
    response_mask[3 % num_rows] = 0
    ids = torch.randint(2, VOCABULARY, attention.shape, generator=generator)
    mask = response_mask.float()

    def random(scale=1.0, offset=0.0):
        return (torch.randn(response_mask.shape, generator=generator) * scale + offset) * mask

    return DataProto.from_dict(
        {
            "input_ids": torch.where(attention.bool(), ids, pad_id),
            "attention_mask": attention,
            "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
            "response_mask": response_mask,
            "advantages": random(),
            "old_log_probs": random(shift, -3.7),
            "ref_log_prob": random(shift, -3.7),
            "values": random(),
            "returns": random(),
            "rollout_log_probs": random(shift, -3.7),
        }
    )


def make_actor(config: Config, world_size=1) -> DataParallelPPOActor:
    block = config.actor_rollout_ref
    precision = Precision.from_config(block.actor.fsdp_config, CPU)
    engine = TrainEngine(
        load_policy(block.model, precision.model, reads_weights=world_size == 1),
        precision,
        block.actor.fsdp_config,
        CPU,
        world_size,
        block.actor.optim,
        block.actor.grad_clip,
        block.actor.ulysses_sequence_parallel_size,
    )
    padded = not block.model.use_remove_padding
    num_token_sharing = block.actor.ulysses_sequence_parallel_size
    limits = MicroBatchLimits.from_config(block.actor, "ppo", CPU, padded, num_token_sharing)
    return DataParallelPPOActor(block.actor, engine, limits, block.rollout.temperature, block.rollout.n)


def make_critic(config: Config, world_size=1) -> DataParallelPPOCritic:
    block = config.critic
    precision = Precision.from_config(block.model.fsdp_config, CPU)
    engine = TrainEngine(
        load_value_model(block.model, precision.model, reads_weights=world_size == 1),
        precision,
        block.model.fsdp_config,
        CPU,
        world_size,
        block.optim,
        block.grad_clip,
        block.ulysses_sequence_parallel_size,
    )
    padded = not block.model.use_remove_padding
    num_token_sharing = block.ulysses_sequence_parallel_size
    limits = MicroBatchLimits.from_config(block, "ppo", CPU, padded, num_token_sharing)
    return DataParallelPPOCritic(block, engine, limits)


def reference_log_probs(model_path, batch, temperature=1.0):
    """Log-probs and entropies [N, R] by Hugging Face's eager attention, row by row, through the full
    logits.
    """
    model = AutoModelForCausalLM.from_pretrained(model_path, attn_implementation="eager")
    mask = batch.batch["response_mask"]
    log_probs = []
    entropies = []
    for ids, attention in zip(batch.batch["input_ids"], batch.batch["attention_mask"], strict=True):
        sequence = ids[attention.bool()]
        log_p = (model(sequence[None]).logits[0, :-1] / temperature).log_softmax(-1)
        log_prob = log_p.gather(1, sequence[1:, None])[:, 0]
        entropy = -(log_p.exp() * log_p).sum(-1)
        response = int(attention[-mask.shape[1] :].sum())
        for rows, values in ((log_probs, log_prob), (entropies, entropy)):
            rows.append(
                torch.nn.functional.pad(values[-response:], (0, mask.shape[1] - response))
                * mask[0].new_ones(())
            )
    return model, torch.stack(log_probs) * mask, torch.stack(entropies) * mask


def gradients_of(engine, update):
    """Runs `update()` with the optimizer held back; returns (its result, name -> gradient before each
    step).
    """
    recorded = []

    def hold(discard=False):
        recorded.append(
            {n: whole(p.grad).clone() for n, p in engine.module.named_parameters() if p.requires_grad}
        )
        engine.optimizer.zero_grad(set_to_none=True)
        return 1.0, not discard

    kept = engine.step
    engine.step = hold
    try:
        with warnings.catch_warnings():  # the schedule notices that the optimizer did not step
            warnings.simplefilter("ignore", UserWarning)
            return update(), recorded
    finally:
        engine.step = kept


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def assert_same_gradients(actual, expected, tolerance=1e-5):
    """Relative to the norm of each parameter's gradient."""
    assert actual.keys() == expected.keys()
    for name, want in expected.items():
        error = (actual[name] - want).norm().item()
        size = want.norm().item()
        assert error <= tolerance * size + 1e-8, f"{name}: off by {error} of {size}"


def save(engine, folder):
    """A checkpoint, at once."""
    engine.snapshot(folder).write()
    if engine.world_size > 1:
        torch.distributed.barrier()


def save_hf(engine, folder, tokenizer, base):
    """A Hugging Face folder of the weights; beside it the checkpoint that it comes from."""
    saved = Path(f"{folder} checkpoint")
    save(engine, saved)
    engine.snapshot_hf(folder, tokenizer, base, saved).write()
    if engine.world_size > 1:
        torch.distributed.barrier()
