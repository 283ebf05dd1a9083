"""Draw how each update of a run changes the log-probability of closing the second query.

    bash train_grpo.sh trainer.save_freq=1 trainer.max_ckpt_to_keep=null trainer.num_trajectories_logged=1000
    python scripts/plot_action_tokens.py --out picture.png "without=FOLDER OF A RUN" "with=FOLDER OF A RUN"

Step t of a run samples trajectories with the weights of checkpoint t - 1 and ends with checkpoint t. For the
trajectories of each step whose second turn is a closed query, the script computes the log-probability of
`</search>`, the last token of that turn, with the weights before and after the update, given all tokens
before it and at the run's temperature. The upper panel shows the mean difference of a step, in nats. The
lower panel shows the share of the step's trajectories that ended in an answer. Steps without such a query
have no point.

Each run's folder gets a file action_tokens.jsonl: step, mean and least change, number of queries. If it is
there already the script reads it and computes nothing.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import verl  # noqa: E402, F401  # isort: skip  (first: it says which Python has a missing package)
import matplotlib.pyplot as plt  # noqa: E402
import torch  # noqa: E402
import yaml  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase  # noqa: E402

from verl.utils.hub import use_cache_if_hub_is_away  # noqa: E402
from verl.utils.json_files import last_steps, read_lines, write_lines  # noqa: E402
from verl.utils.text import printable

CLOSING_TAG = "</search>"
MAX_QUERIES = 32  # of one step


def closed_second_query(trajectory: dict[str, Any]) -> int | None:
    """Return where the second turn ends in the trajectory's tokens if it is a closed query, else None."""
    turns = trajectory["turns"]
    if len(turns) < 2 or turns[1]["action"] != "search" or not turns[1]["text"].endswith(CLOSING_TAG):
        return None
    end: int = turns[1]["end"]
    return end


class TokenIds:
    """The ids of decoded tokens, for tokenizers in which most tokens have a text of their own."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._id_of: dict[str, int] = {}
        self._doubtful: set[str] = set()
        for token in range(len(tokenizer)):
            text = str(tokenizer.decode([token]))
            if text in self._id_of:
                self._doubtful.add(text)
            self._id_of[text] = token

    def ids(self, texts: list[str]) -> list[int] | None:
        """Return the ids of decoded tokens, or None if one could be several ids (a part of a letter)."""
        if self._doubtful.intersection(texts):
            return None
        return [self._id_of[text] for text in texts]

    def prompt(self, text: str) -> list[int]:
        """Return the ids of a prompt."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids


def queries_of_step(path: Path, token_ids: TokenIds, hops: int | None) -> list[list[int]]:
    """Return the ids through the closing tag, for the step's training trajectories that have such a query."""
    sequences = []
    for row in read_lines(path):
        if hops is not None and row["extra_info"].get("hops") != hops:
            continue
        trajectory = row["trajectory"]
        end = closed_second_query(trajectory) if row["split"] == "train" else None
        if end is None:
            continue
        response = token_ids.ids(row["tokens"][:end])
        if response is not None:
            sequences.append(token_ids.prompt(trajectory["prompt_text"]) + response)
    return sequences[:MAX_QUERIES]


@torch.no_grad()
def last_log_probs(model: torch.nn.Module, sequences: list[list[int]], temperature: float) -> torch.Tensor:
    """Return the log-probability [N] of the last token of each sequence, given the ones before it."""
    length = max(len(sequence) for sequence in sequences)
    ids = torch.zeros(len(sequences), length, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for number, sequence in enumerate(sequences):
        ids[number, : len(sequence)] = torch.tensor(sequence)
        mask[number, : len(sequence)] = 1
    logits = model(input_ids=ids, attention_mask=mask).logits
    lasts = mask.sum(1) - 1
    rows = torch.arange(len(sequences))
    log_probs = torch.log_softmax(logits[rows, lasts - 1].float() / temperature, -1)
    return log_probs[rows, ids[rows, lasts]]


def weights_after(run: Path, step: int, base_model: str) -> Path:
    """Return the folder of the model after a step; the one that the run began with for step 0."""
    return Path(base_model) if step == 0 else run / f"global_step_{step}" / "actor" / "huggingface"


def measure(run: Path, hops: int | None = None) -> list[dict[str, Any]]:
    """Return a line for each step of a run that has both checkpoints, and write them to its folder.

    Args:
        run: the run's folder.
        hops: only queries of questions with this number of hops count; None for all questions.
    """
    settings = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))["actor_rollout_ref"]
    temperature = settings["rollout"]["temperature"]
    base_model = settings["model"]["path"]
    use_cache_if_hub_is_away({"actor_rollout_ref.model.path": base_model})
    token_ids = TokenIds(AutoTokenizer.from_pretrained(base_model))
    lines: list[dict[str, Any]] = []
    step = 1
    before = AutoModelForCausalLM.from_pretrained(base_model, dtype=torch.float32)
    while weights_after(run, step, base_model).is_dir():
        after = AutoModelForCausalLM.from_pretrained(
            weights_after(run, step, base_model), dtype=torch.float32
        )
        sequences = queries_of_step(run / "trajectories" / f"step_{step}.jsonl", token_ids, hops)
        if sequences:
            change = last_log_probs(after, sequences, temperature)
            change -= last_log_probs(before, sequences, temperature)
            lines.append(
                {
                    "step": step,
                    "change": float(change.mean()),
                    "least": float(change.min()),
                    "queries": len(sequences),
                }
            )
        before = after
        step += 1
    if not lines:
        raise ValueError(
            f"Found no checkpoint of step 1 with a closed second query in {run}; expected a run with "
            "trainer.save_freq=1 trainer.max_ckpt_to_keep=null trainer.num_trajectories_logged=1000."
        )
    write_lines(run / "action_tokens.jsonl", lines)
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("runs", nargs="+", help="LABEL=FOLDER of each run")
    parser.add_argument("--hops", type=int, help="only questions with this number of hops; default: all")
    parser.add_argument("--out", type=Path, required=True, help="the picture's file")
    options = parser.parse_args()
    figure, (upper, lower) = plt.subplots(2, 1, figsize=(9, 6), sharex=True)
    for number, argument in enumerate(options.runs):
        label, _, folder = argument.partition("=")
        run = Path(folder)
        if not (run / "config.yaml").is_file():
            print(f"error: Found {argument!r}; expected LABEL=FOLDER of a run.", file=sys.stderr)
            return 2
        lines = read_lines(run / "action_tokens.jsonl")
        try:
            lines = lines or measure(run, options.hops)
        except ValueError as error:
            print(f"error: {printable(error)}", file=sys.stderr)
            return 2
        colour = f"C{number}"
        steps = [line["step"] for line in lines]
        upper.plot(steps, [line["change"] for line in lines], ".-", color=colour, label=label)
        answered = last_steps(read_lines(run / "metrics.jsonl"), "env/finish_ratio")
        lower.plot(*zip(*answered, strict=True), ".-", color=colour)
    upper.axhline(0, color="black", linewidth=0.5)
    upper.set(ylabel="change of log p(</search>)\nin one update, nats")
    lower.set(xlabel="step", ylabel="share of trajectories\nthat end in an answer", ylim=(0, 1.02))
    upper.legend(frameon=False)
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(options.out, dpi=110)
    return 0


if __name__ == "__main__":
    sys.exit(main())
