"""Pretrain the tiny base model on a stream of microworlds that are never seen again.

    OMP_NUM_THREADS=1 python -m data_prep.pretrain_base --work data_prep/base_model_wip
    OMP_NUM_THREADS=1 python -m data_prep.pretrain_base --plain --work data_prep/base_model_wip/plain

    seed, pool number -> a fresh world -> samples (data_prep.demonstrations) -> length-sorted token batches
        -> Qwen3 in bf16 autocast -> weighted loss over a fixed number of tokens -> Muon and AdamW

All randomness comes from (seed, pool number), and progress is counted in pools: killed and started again
with the same arguments it goes on from the last checkpoint in `--work` to the same weights. Each checkpoint
also leaves the model in Hugging Face form in `--work`/hf. The learning rate falls to zero over the last part
of the run; reinforcement learning from a base whose rate was not brought down does not recover (a probe
showed it).

`--plain` makes `base_model_plain`, which has never seen anything of the protocol: it reads and answers
questions in plain words, with the same tokenizer, whose tags no sample holds.

Loss is taken on all tokens that the samples mark as trained and on a share of the others. It is divided by a
constant, not by the tokens of its own batch: batches are sorted by length, and a norm of each batch's own
would make short traces count for more.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from data_prep.base_evaluation import evaluate, reading_accuracy
from data_prep.demonstrations import PLAIN, PROTOCOL, Demonstrator, Sample
from data_prep.microworld import FIRST_PRETRAINING_SEED, pretraining_world
from data_prep.prompts import MICROWORLD_PROMPT
from data_prep.tiny_tokenizer import train_tokenizer

CONTEXT_SHARE = 0.12  # share of the untrained tokens (questions, documents) that get a loss too
TOKENS_PER_LOSS = 0.35  # the constant behind the loss: trained tokens for each token of a batch, about


@dataclass(frozen=True)
class Settings:
    """Everything that decides the result."""

    seed: int = 0
    num_pools: int = 450
    samples_per_pool: int = 128
    tokens_per_batch: int = 3072
    warmup_pools: int = 4
    mix_pools: int = 160  # over which the shares of the kinds of samples move to their final values
    decay_pools: int = 200  # last part of the run, over which the learning rate falls to zero
    muon_lr: float = 1e-2
    adam_lr: float = 1e-3
    embedding_std: float = 0.1  # at 0.02 names stay too alike for copying to form
    hidden_size: int = 128
    num_layers: int = 3
    num_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 384
    vocab_size: int = 2560
    protocol: bool = True  # False: plain reading, without tags and without searches


# Shorter: there is less to learn.
PLAIN_RUN: dict[str, Any] = {"protocol": False, "num_pools": 320, "mix_pools": 80, "decay_pools": 100}


@dataclass(frozen=True)
class Batch:
    """input_ids [B, L] int64, right padded; positions [M] int64 into the flattened B*L, targets [M] int64."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    targets: torch.Tensor
    num_tokens: int


def build_model(settings: Settings, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A Qwen3 with fresh weights from the seed."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=settings.num_heads,
        num_key_value_heads=settings.num_heads,
        head_dim=settings.head_dim,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(settings.seed)
    model = Qwen3ForCausalLM(config)  # attention: sdpa, the default
    torch.manual_seed(settings.seed + 1)
    torch.nn.init.normal_(model.get_input_embeddings().weight, std=settings.embedding_std)
    return model


def encode(tokenizer: PreTrainedTokenizerFast, samples: list[Sample]) -> list[tuple[list[int], list[bool]]]:
    """(token ids, which are trained) for each sample; each segment is tokenised alone."""
    flat = tokenizer([text for sample in samples for text, _ in sample], add_special_tokens=False)[
        "input_ids"
    ]
    pieces, encoded = iter(flat), []
    for sample in samples:
        ids: list[int] = []
        trained: list[bool] = []
        for _, is_trained in sample:
            piece = next(pieces)
            ids += piece
            trained += [is_trained] * len(piece)
        encoded.append((ids, trained))
    return encoded


def make_pool(settings: Settings, tokenizer: PreTrainedTokenizerFast, pool: int) -> list[Batch]:
    """The batches of a pool, a pure function of settings and pool number, in random order."""
    rng = random.Random(f"pool {settings.seed} {pool}")
    world_seed = FIRST_PRETRAINING_SEED + settings.seed * 1_000_000 + pool
    wording = PROTOCOL if settings.protocol else PLAIN
    student = Demonstrator(pretraining_world(world_seed), rng, wording=wording)
    samples = [student.draw(min(1.0, pool / settings.mix_pools)) for _ in range(settings.samples_per_pool)]
    encoded = sorted(encode(tokenizer, samples), key=lambda item: len(item[0]))
    groups: list[list[tuple[list[int], list[bool]]]] = [[]]
    for item in encoded:
        if groups[-1] and len(item[0]) * (len(groups[-1]) + 1) > settings.tokens_per_batch:
            groups.append([])
        groups[-1].append(item)
    rng.shuffle(groups)
    return [collate(group, rng, tokenizer.pad_token_id) for group in groups]


def collate(group: list[tuple[list[int], list[bool]]], rng: random.Random, pad_id: int) -> Batch:
    """Right-padded rows (causal attention never looks at the padding) and the positions that get a loss."""
    width = max(len(ids) for ids, _ in group)
    positions, targets = [], []
    for row, (ids, trained) in enumerate(group):
        for k in range(1, len(ids)):
            if trained[k] or rng.random() < CONTEXT_SHARE:
                positions.append(row * width + k - 1)
                targets.append(ids[k])
    rows = [ids + [pad_id] * (width - len(ids)) for ids, _ in group]
    return Batch(
        torch.tensor(rows), torch.tensor(positions), torch.tensor(targets), sum(len(i) for i, _ in group)
    )


def batch_loss(model: Qwen3ForCausalLM, batch: Batch) -> torch.Tensor:
    """Summed cross-entropy of the batch's targets over the constant number of trained tokens."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.model(input_ids=batch.input_ids, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden.flatten(0, 1)[batch.positions])
    loss = F.cross_entropy(logits.float(), batch.targets, reduction="sum")
    return loss / (TOKENS_PER_LOSS * batch.input_ids.numel())


def build_optimizers(model: Qwen3ForCausalLM, settings: Settings) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for embeddings and norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=settings.muon_lr, weight_decay=0.0, momentum=0.95),
        torch.optim.AdamW(others, lr=settings.adam_lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def learning_rate_share(settings: Settings, pool: int) -> float:
    """Warm-up, a plateau, then linearly down to zero; 1 on the plateau."""
    left = (settings.num_pools - pool) / settings.decay_pools
    return min(1.0, (pool + 1) / settings.warmup_pools, left)


class Pretraining:
    """Model, optimizers and the number of the next pool, with checkpoints in `work`."""

    def __init__(self, settings: Settings, work: Path) -> None:
        self.settings, self.work = settings, work
        self.tokenizer = train_tokenizer(settings.vocab_size)
        self.model = build_model(settings, self.tokenizer)
        self.optimizers = build_optimizers(self.model, settings)
        self.base_rates = [group["lr"] for o in self.optimizers for group in o.param_groups]
        self.next_pool = 0
        self.num_tokens = 0
        if (work / "state.pt").exists():
            self.load()

    def load(self) -> None:
        """Go on from the checkpoint; ValueError if it was made with other settings.

        Only `num_pools` may differ, as long as neither run had begun to bring the learning rate down.
        """
        state = torch.load(self.work / "state.pt", weights_only=True)
        saved, given = state["settings"], asdict(self.settings)
        same = {**saved, "num_pools": 0} == {**given, "num_pools": 0}
        plateau = min(saved["num_pools"], given["num_pools"]) - self.settings.decay_pools
        if saved != given and not (same and state["next_pool"] <= plateau):
            raise ValueError(
                f"{self.work / 'state.pt'} was made with the settings {saved}, not with {given}: "
                "give the same arguments or another --work"
            )
        self.model.load_state_dict(state["model"])
        for optimizer, values in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(values)
        self.next_pool, self.num_tokens = state["next_pool"], state["num_tokens"]

    def save(self) -> None:
        """Checkpoint and Hugging Face folder, each written aside and renamed."""
        self.work.mkdir(parents=True, exist_ok=True)
        state = {
            "settings": asdict(self.settings),
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "next_pool": self.next_pool,
            "num_tokens": self.num_tokens,
        }
        torch.save(state, self.work / "state.pt.tmp")
        (self.work / "state.pt.tmp").replace(self.work / "state.pt")
        self.export(self.work / "hf")

    def export(self, folder: Path) -> None:
        """Model (float32 safetensors) and tokenizer, as AutoModelForCausalLM and AutoTokenizer read them.

        Pretraining ties the head to the embeddings; the model that is written has a head of its own with the
        same values, which reinforcement learning may move apart.
        """
        folder.mkdir(parents=True, exist_ok=True)
        model = Qwen3ForCausalLM(Qwen3Config(**{**self.model.config.to_dict(), "tie_word_embeddings": False}))
        model.load_state_dict(self.model.state_dict())  # of a tied model it holds lm_head.weight too
        model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        (folder / "prompt_template.txt").write_text(MICROWORLD_PROMPT, encoding="utf-8")

    def train_pool(self) -> float:
        """All steps of the next pool; returns the mean loss per trained token."""
        share = learning_rate_share(self.settings, self.next_pool)
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        for group, rate in zip(groups, self.base_rates, strict=True):
            group["lr"] = rate * share
        total, count = 0.0, 0
        for batch in make_pool(self.settings, self.tokenizer, self.next_pool):
            loss = batch_loss(self.model, batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            total += loss.item() * TOKENS_PER_LOSS * batch.input_ids.numel()
            count += len(batch.targets)
            self.num_tokens += batch.num_tokens
        self.next_pool += 1
        return total / count

    def run(
        self, checkpoint_seconds: float, eval_pools: int, stop_after: int | None = None
    ) -> Iterator[dict]:
        """Train to the end (or for `stop_after` pools), yielding a log line every `eval_pools` pools."""
        saved = started = time.monotonic()
        last = self.settings.num_pools if stop_after is None else self.next_pool + stop_after
        losses: list[float] = []
        while self.next_pool < min(last, self.settings.num_pools):
            losses.append(self.train_pool())
            if self.next_pool % eval_pools == 0 or self.next_pool == self.settings.num_pools:
                line = {
                    "pool": self.next_pool,
                    "tokens": self.num_tokens,
                    "loss": sum(losses) / len(losses),
                    "seconds": time.monotonic() - started,
                    "cpu_seconds": time.process_time(),
                }
                losses = []
                yield line | reading_accuracy(self.model, self.tokenizer, tagged=self.settings.protocol)
            if time.monotonic() - saved > checkpoint_seconds:
                self.save()
                saved = time.monotonic()
        self.save()


def rounded(line: dict) -> str:
    """A log line as JSON, numbers short."""
    return json.dumps(
        {k: round(v, 4) if isinstance(v, float) and math.isfinite(v) else v for k, v in line.items()}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Pretrain the tiny base model on microworlds.")
    parser.add_argument("--plain", action="store_true", help="without anything of the protocol")
    parser.add_argument(
        "--out", type=Path, help="folder of the result (default: base_model or base_model_plain beside this)"
    )
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoints, and to go on from")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--num-pools",
        type=int,
        help=f"length of the run, in worlds (default {Settings.num_pools}; plain: {PLAIN_RUN['num_pools']})",
    )
    parser.add_argument("--checkpoint-seconds", type=float, default=150.0, help="time between checkpoints")
    parser.add_argument("--eval-pools", type=int, default=20, help="pools between two log lines")
    args = parser.parse_args()
    torch.set_num_threads(1)
    settings = Settings(seed=args.seed, **(PLAIN_RUN if args.plain else {}))
    if args.num_pools is not None:
        settings = replace(settings, num_pools=args.num_pools)
    pretraining = Pretraining(settings, args.work)
    num_parameters = sum(p.numel() for p in pretraining.model.parameters())
    vocabulary = len(pretraining.tokenizer)
    print(f"{num_parameters} parameters, vocabulary {vocabulary}, from pool {pretraining.next_pool}")
    for line in pretraining.run(args.checkpoint_seconds, args.eval_pools):
        print(rounded(line), flush=True)
    out = args.out or Path(__file__).parent / ("base_model_plain" if args.plain else "base_model")
    pretraining.export(out)
    print(rounded(evaluate(out, tagged=settings.protocol)), flush=True)


if __name__ == "__main__":
    main()
