"""Pretrain the tiny base models on a stream of microworlds that are never seen again.

    OMP_NUM_THREADS=1 python -m data_prep.pretrain_base --out data_prep/base_model
    OMP_NUM_THREADS=1 python -m data_prep.pretrain_base --plain --out data_prep/base_model_plain

    seed, pool number -> a fresh world -> samples (data_prep.demonstrations) -> length-sorted token batches
        -> Qwen3 in bf16 autocast -> weighted loss over a fixed number of tokens -> Muon and AdamW

All randomness comes from (seed, pool number). The learning rate falls to zero over the last part of the run,
because reinforcement learning does not recover from a base whose rate was not brought down (a probe showed
it). `--plain` makes a model that reads and answers in plain words, and has never seen anything of the
protocol.

The loss of the tokens that samples mark as trained, and of a share of the others, is divided by a constant.
Batches are sorted by length, and dividing by each batch's own count would make short traces count for more.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from data_prep.demonstrations import PLAIN, PROTOCOL, Demonstrator
from data_prep.microworld import FIRST_PRETRAINING_SEED, pretraining_world
from data_prep.prompts import MICROWORLD_PROMPT
from data_prep.tiny_tokenizer import train_tokenizer

CONTEXT_SHARE = 0.12  # share of the untrained tokens (questions, documents) that get a loss too
TOKENS_PER_LOSS = 0.35  # the constant that divides the loss: about the share of trained tokens in a batch
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""input_ids [B, L] int64, right padded; positions [M] int64 into the flattened B*L, targets [M] int64."""


@dataclass(frozen=True)
class PretrainingSettings:
    """The settings that decide the result."""

    seed: int = 0
    num_pools: int = 450
    samples_per_pool: int = 128
    tokens_per_batch: int = 3072
    warmup_pools: int = 4
    mix_pools: int = 160  # pools over which the shares of the kinds of samples move to their final values
    decay_pools: int = 200  # last pools of the run, over which the learning rate falls to zero
    muon_lr: float = 1e-2
    adam_lr: float = 1e-3
    embedding_std: float = 0.1  # at 0.02 names stay too alike for copying to form
    hidden_size: int = 128
    num_hidden_layers: int = 3
    num_attention_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 384
    vocab_size: int = 2560
    protocol: bool = True  # False: plain reading, without tags and without searches


# The plain run is shorter, because there is less to learn.
PLAIN_RUN: dict[str, Any] = {"protocol": False, "num_pools": 320, "mix_pools": 80, "decay_pools": 100}


def build_model(settings: PretrainingSettings, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Build a Qwen3 with fresh weights from the seed."""
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
    config = Qwen3Config(
        **{name: getattr(settings, name) for name in sizes}, num_key_value_heads=settings.num_attention_heads,
        vocab_size=len(tokenizer), max_position_embeddings=2048, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(settings.seed)
    model = Qwen3ForCausalLM(config)  # with the default attention, sdpa
    torch.manual_seed(settings.seed + 1)
    torch.nn.init.normal_(model.get_input_embeddings().weight, std=settings.embedding_std)
    return model


def make_pool(settings: PretrainingSettings, tokenizer: PreTrainedTokenizerFast, pool: int) -> list[Batch]:
    """Make the batches of a pool in random order, a pure function of settings and pool number."""
    rng = random.Random(f"pool {settings.seed} {pool}")
    world = pretraining_world(FIRST_PRETRAINING_SEED + settings.seed * 1_000_000 + pool)
    student = Demonstrator(world, rng, wording=PROTOCOL if settings.protocol else PLAIN)
    samples = [student.draw(min(1.0, pool / settings.mix_pools)) for _ in range(settings.samples_per_pool)]
    rows = []  # for each sample its (token, whether it is trained); each segment is tokenised alone
    for sample in samples:
        pieces = tokenizer([text for text, _ in sample], add_special_tokens=False)["input_ids"]
        rows.append([(i, trained) for ids, (_, trained) in zip(pieces, sample, strict=True) for i in ids])
    groups: list[list[list[tuple[int, bool]]]] = [[]]
    for row in sorted(rows, key=len):
        if groups[-1] and len(row) * (len(groups[-1]) + 1) > settings.tokens_per_batch:
            groups.append([])
        groups[-1].append(row)
    rng.shuffle(groups)
    batches = []
    for group in groups:
        width = max(map(len, group))
        # Attention is causal, so padding on the right is never seen.
        input_ids = torch.full((len(group), width), tokenizer.pad_token_id)
        positions = []
        targets = []
        for number, row in enumerate(group):
            input_ids[number, : len(row)] = torch.tensor([token for token, _ in row])
            for k, (token, trained) in enumerate(row[1:]):
                if trained or rng.random() < CONTEXT_SHARE:
                    positions.append(number * width + k)
                    targets.append(token)
        batches.append((input_ids, torch.tensor(positions), torch.tensor(targets)))
    return batches


def train(settings: PretrainingSettings) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """Run the whole pretraining; print the mean loss per trained token every 20 pools."""
    tokenizer = train_tokenizer(settings.vocab_size)
    model = build_model(settings, tokenizer)
    # Muon for the matrices inside the layers, AdamW for embeddings and norms.
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    muon = torch.optim.Muon(matrices, lr=settings.muon_lr, weight_decay=0.0, momentum=0.95)
    adam = torch.optim.AdamW(others, lr=settings.adam_lr, betas=(0.9, 0.98), weight_decay=0.0)
    started = time.monotonic()
    total = 0.0
    count = 0
    for pool in range(settings.num_pools):
        # The rate warms up, stays on a plateau, then falls linearly to zero.
        decay_share = (settings.num_pools - pool) / settings.decay_pools
        share = min(1.0, (pool + 1) / settings.warmup_pools, decay_share)
        muon.param_groups[0]["lr"] = settings.muon_lr * share
        adam.param_groups[0]["lr"] = settings.adam_lr * share
        for input_ids, positions, targets in make_pool(settings, tokenizer, pool):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                hidden = model.model(input_ids=input_ids, use_cache=False).last_hidden_state
                logits = model.lm_head(hidden.flatten(0, 1)[positions])
            loss_sum = F.cross_entropy(logits.float(), targets, reduction="sum")
            (loss_sum / (TOKENS_PER_LOSS * input_ids.numel())).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in (muon, adam):
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            total = total + loss_sum.item()
            count = count + len(targets)
        if (pool + 1) % 20 == 0 or pool + 1 == settings.num_pools:
            seconds = time.monotonic() - started
            print(f"pool {pool + 1}: loss {total / count:.4f}, {seconds:.0f} s", flush=True)
            total = 0.0
            count = 0
    return model, tokenizer


def export(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write model (float32 safetensors) and tokenizer.

    Pretraining ties the head to the embeddings. The written model has a head of its own with the same values,
    which reinforcement learning may move apart.
    """
    untied = Qwen3ForCausalLM(Qwen3Config(**{**model.config.to_dict(), "tie_word_embeddings": False}))
    untied.load_state_dict(model.state_dict())  # that of a tied model holds lm_head.weight too
    untied.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "prompt_template.txt").write_text(MICROWORLD_PROMPT, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Pretrain the tiny base model on microworlds.")
    parser.add_argument("--plain", action="store_true", help="without anything of the protocol")
    parser.add_argument("--out", type=Path, required=True, help="folder of the result")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-pools", type=int, help="length of the run, in worlds (450; plain: 320)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    settings = PretrainingSettings(seed=args.seed, **(PLAIN_RUN if args.plain else {}))
    if args.num_pools is not None:
        settings = replace(settings, num_pools=args.num_pools)
    export(*train(settings), args.out)


if __name__ == "__main__":
    main()
