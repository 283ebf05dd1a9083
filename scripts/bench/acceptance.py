"""The parts that the acceptance run's checks share: figures and their bars, random models, the page.

check(Setup) -> Measurements -> report -> Markdown
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
QWEN = {"1.5b": (1536, 8960, 28, 12, 2), "0.5b": (896, 4864, 24, 14, 2), "tiny": (64, 160, 2, 2, 1)}
QWEN |= {"7b": (3584, 18944, 28, 28, 4), "3b": (2048, 11008, 36, 16, 2)}
UNTIED = ("7b",)  # shapes with an output matrix of their own
BARS = {  # a figure's name -> (at least, at most)
    "log-probs apart, mean": (0.0, 0.01),
    "log-probs apart, most": (0.0, 0.25),
    "update, share of products": (0.45, 1.0),
    "weight sync, share of a step": (0.0, 0.02),
    "update's memory, of the plan's": (0.9, 1.1),
    "greedy tokens equal": (1.0, 1.0),
    "values that differ after resuming": (0.0, 0.0),
    "values that differ with offloading": (0.0, 0.0),
    "planted vectors found": (1.0, 1.0),
    "FAISS's copy, of what is counted": (0.8, 1.0),
    "decode, of vLLM's own": (0.95, 10.0),
    "decode ahead, of vLLM's own": (0.95, 10.0),
    "decode ahead, tokens equal": (0.9, 1.0),
}
RUNS = ("microworld", "vllm", "FSDP2", "Megatron, tensor 2", "vLLM, split over 2", "vLLM, apart")
BARS |= dict.fromkeys((f"{name}, EM" for name in RUNS), (0.9, 1.0))
ANYWHERE = ("greedy tokens equal", "planted vectors found", "log-probs apart, mean", "log-probs apart, most")
ANYWHERE += ("values that differ after resuming", "values that differ with offloading")
ANYWHERE += ("decode ahead, tokens equal",)


@dataclass(frozen=True)
class Measurement:
    """One figure of a check.

    `verdict` is pass, fail, measured (there is no bar), or not run (the reason is in `unit`).
    """

    name: str
    figure: float
    unit: str
    verdict: str = "measured"


@dataclass(frozen=True)
class Setup:
    """The device on which the checks run, and how much of them."""

    device: str
    shape: str
    quick: bool
    work: Path

    def measurement(self, name: str, figure: float, unit: str = "") -> Measurement:
        low, high = BARS.get(name, (-math.inf, math.inf))
        if name not in BARS or (self.device == "cpu" and name not in ANYWHERE):
            return Measurement(name, figure, unit)
        return Measurement(name, figure, unit, "pass" if low <= figure <= high else "fail")

    def model(self, shape: str | None = None) -> Path:
        """Return the folder of a random model, which is made once."""
        from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

        shape = "tiny" if self.device == "cpu" else shape or self.shape
        folder = self.work / "models" / shape
        if (folder / "tokenizer.json").exists():
            return folder
        hidden, intermediate, layers, heads, groups = QWEN[shape]
        if shape == "tiny":
            vocab_size = 2000
        else:
            vocab_size = 152064 if shape in UNTIED else 151936
        config = Qwen2Config(
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=groups,
            vocab_size=vocab_size,
            tie_word_embeddings=shape not in UNTIED,
            max_position_embeddings=32768,
            eos_token_id=1,
        )
        torch.manual_seed(0)
        with torch.device(self.device):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(ROOT / "data_prep" / "base_model").save_pretrained(folder)
        return folder


def report(results: dict[str, list[dict[str, Any]]], head: str) -> str:
    """Return the page in Markdown."""
    page_lines = [
        "# What this machine showed",
        "",
        head,
        "",
        "| check | | figure | | bar |",
        "|---|---|---|---|---|",
    ]
    for check, check_lines in results.items():
        for line in check_lines:
            low, high = BARS.get(line["name"], (None, None))
            bar = "" if low is None else f"{low:g} to {high:g}"
            figure = "" if math.isnan(line["figure"]) else f"{line['figure']:.4g}"
            verdict = line["verdict"]
            page_lines.append(f"| {check} | {line['name']} | {figure} {line['unit']} | {verdict} | {bar} |")
    return "\n".join(page_lines) + "\n"
