"""What weights in files cost while a model learns: bytes, and seconds to write and read a version.

    python scripts/bench_weight_sync.py [--model FOLDER] [--lr 1e-6,1e-5,8e-4] [--steps 20]      Markdown

Each step of AdamW on demonstrations of searching is written for rollouts in bf16 and fp32, and what is read
again is compared bit by bit. Means over the versions that are deltas: "changed", the share of the elements
that a step changes; "of full", the bytes of the delta over those of the tensors.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import verl  # noqa: E402, F401  # isort: skip  (first: it says which Python has what is missing)
import torch  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from data_prep.sft_rows import demonstrations  # noqa: E402
from verl.utils.weight_files import WeightReader, WeightWriter, bits_of  # noqa: E402


def measure(path: Path, dtype: torch.dtype, lr: float, steps: int, folder: Path) -> str:
    """A line of the table."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    rows = demonstrations(0, 8 * (steps + 1), right_share=1)
    texts = ["".join(part["text"] for part in row["segments"]) for row in rows]
    writer, reader = WeightWriter(folder, 50, ["it"]), WeightReader(folder, "it")
    deltas: list[tuple[float, ...]] = []
    before: dict[str, torch.Tensor] = {}
    for step in range(steps + 1):
        now = {name: p.detach().to(dtype, copy=True) for name, p in model.named_parameters()}
        started = time.perf_counter()
        manifest = writer.write(now.items(), step)
        written = time.perf_counter()
        arrived = dict(reader.read(step))
        seconds = (written - started, time.perf_counter() - written)
        assert all((bits_of(arrived[name]) == bits_of(x)).all() for name, x in now.items()), "it differs"
        if manifest["kind"] == "delta":
            changed = sum(int((before[name] != x).sum()) for name, x in now.items())
            of_full = sum(manifest["files"].values()) / sum(x.nbytes for x in now.values())
            deltas.append((changed / sum(x.numel() for x in now.values()), of_full, *seconds))
        before = now
        batch = tokenizer(texts[8 * step : 8 * step + 8], return_tensors="pt", padding=True)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        model(**batch, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    share, of_full, write, read = map(mean, zip(*deltas, strict=True))
    return f"{share:.1%} | {of_full:.3f} | {len(deltas)} of {steps} | {write:.3f} | {read:.3f} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=ROOT / "data_prep/base_model", help="a model folder")
    parser.add_argument("--lr", default="1e-6,1e-5,8e-4", help="learning rates (1e-6,1e-5,8e-4)")
    parser.add_argument("--steps", type=int, default=20, help="of each (20)")
    options = parser.parse_args()
    print("| lr | rollouts | changed | of full | deltas | write, s | read, s |\n" + "|---" * 7 + "|")
    for lr in options.lr.split(","):
        for dtype in (torch.bfloat16, torch.float32):
            with tempfile.TemporaryDirectory() as folder:
                line = measure(options.model, dtype, float(lr), options.steps, Path(folder))
            print(f"| {lr} | {str(dtype)[6:]} | {line}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
