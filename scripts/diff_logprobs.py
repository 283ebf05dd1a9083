"""How far the rollout engines' log-probs are from the trainer's, on the same sampled tokens.

    python scripts/diff_logprobs.py [--model FOLDER] [--engines native,vllm,...] [--dtypes float32,bfloat16]

Each engine gets the trainer's weights, answers every prompt in several turns (what lies between them, here
the next prompt's tokens, is an observation that nobody sampled), and says how probable each sampled token is.
The trainer computes the same from the finished token ids, as it does in an update. A line per engine, dtype
of the engine and way of sampling:

    temperature 1        the log-probs that training compares (`rollout_corr/*` in its metrics)
    temperature T        the same at another temperature, which the trainer divides its logits by too
    temperature T, top-p tokens from a truncated distribution, but the engine's log-probs of the model itself
                         (temperature 1, nothing cut off): the only ones that the trainer can compute as well

Without --engines, all that are installed. `vllm` needs vLLM in this interpreter; `vllm-apart` starts a server
with the interpreter that --vllm-python names. --json prints the same figures as JSON instead of a table.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from transformers import AutoTokenizer

from data_prep.microworld import write_world
from verl.protocol import DataProto
from verl.trainer.config import load_config
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.workers.actor.dp_actor import compute_log_prob
from verl.workers.actor.rollout_agreement import RolloutAgreement
from verl.workers.engine.engine import TrainEngine
from verl.workers.engine.loading import DTYPES, PolicyModel, load_hf_config, load_policy
from verl.workers.engine.micro_batches import MicroBatchLimits
from verl.workers.engine.precision import Precision
from verl.workers.rollout.build import Request, build_engine
from verl.workers.rollout.engine import EngineUnavailable, RolloutEngine, SamplingParams
from verl.workers.rollout.transformers_engine import TransformersEngine

ROOT = Path(__file__).resolve().parent.parent
ENGINES = ("native", "vllm", "vllm-apart", "transformers")
OBSERVATION_TOKENS = 24
LIMITS = MicroBatchLimits(max_rows=16, max_tokens=8192, padded=False)


@dataclass(frozen=True)
class Sampling:
    """A way of sampling, the engine's log-probs that are compared, and the trainer's temperature for it."""

    name: str
    temperature: float
    top_p: float
    compared: str  # field of Completion
    trainer_temperature: float


@dataclass
class Trajectory:
    """A prompt and what followed: tokens, which of them were sampled, and the engine's log-probs of those."""

    prompt: list[int]
    response: list[int] = dataclasses.field(default_factory=list)
    log_probs: list[float | None] = dataclasses.field(default_factory=list)  # None: an observation


@dataclass(frozen=True)
class Difference:
    """A line of the table. mean, max: of |engine - trainer| in nats; the last five are the worst token's."""

    engine: str
    dtype: str
    sampling: str
    num_tokens: int
    mean: float
    max: float
    kl: float
    k3_kl: float
    prompt: int
    place: int
    token: str
    engine_log_prob: float
    trainer_log_prob: float


def sample(
    engine: RolloutEngine, prompts: Sequence[list[int]], sampling: Sampling, num_turns: int, max_tokens: int
) -> list[Trajectory]:
    """Every prompt answered in `num_turns` turns of at most `max_tokens` tokens."""
    trajectories = [Trajectory(list(prompt)) for prompt in prompts]

    def params(row: int) -> SamplingParams:
        return SamplingParams(max_tokens, sampling.temperature, sampling.top_p, seed=row, ignore_eos=True)

    row_of = {engine.open(prompt, params(row)): row for row, prompt in enumerate(prompts)}
    turns_left = dict.fromkeys(row_of, num_turns)
    while row_of:
        for completion in engine.step():
            session = completion.session_id
            row = row_of[session]
            trajectory = trajectories[row]
            trajectory.response += completion.token_ids
            trajectory.log_probs += getattr(completion, sampling.compared)
            turns_left[session] -= 1
            observation = prompts[(row + 1) % len(prompts)][-OBSERVATION_TOKENS:]
            used = len(trajectory.prompt) + len(trajectory.response) + len(observation)
            if turns_left[session] and used + max_tokens <= engine.max_model_len:
                engine.resume(session, observation, params(row))
                trajectory.response += observation
                trajectory.log_probs += [None] * len(observation)
            else:
                engine.close(session)
                del row_of[session]
    return trajectories


def to_batch(trajectories: Sequence[Trajectory]) -> DataProto:
    """Prompts padded on the left, responses on the right, as generation makes them (`verl/protocol.py`)."""
    left = max(len(t.prompt) for t in trajectories)
    right = max(len(t.response) for t in trajectories)
    shape = (len(trajectories), left + right)
    input_ids, attention = (torch.zeros(shape, dtype=torch.int64) for _ in range(2))
    mask, log_probs = torch.zeros(shape[0], right, dtype=torch.int64), torch.zeros(shape[0], right)
    for row, t in enumerate(trajectories):
        tokens = slice(left - len(t.prompt), left + len(t.response))
        input_ids[row, tokens] = torch.tensor(t.prompt + t.response)
        attention[row, tokens] = 1
        sampled = [value is not None for value in t.log_probs]
        mask[row, : len(sampled)] = torch.tensor(sampled)
        log_probs[row, : len(sampled)] = torch.tensor([value or 0.0 for value in t.log_probs])
    return DataProto.from_dict(
        {
            "input_ids": input_ids,
            "responses": input_ids[:, left:],
            "attention_mask": attention,
            "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
            "response_mask": mask,
            "rollout_log_probs": log_probs,
        }
    )


def difference(
    name: str,
    dtype: str,
    sampling: Sampling,
    batch: DataProto,
    trainer: TrainEngine[PolicyModel],
    tokenizer: Any,
) -> Difference:
    """The engine's log-probs in `batch` against the trainer's."""
    tensors = batch.tensors
    expected = compute_log_prob(trainer, batch, LIMITS, sampling.trainer_temperature)
    mask = tensors["response_mask"].bool()
    agreement = RolloutAgreement(tensors["rollout_log_probs"], expected, mask)
    figures, worst = agreement.metrics(trainer.reduce), agreement.worst()
    assert worst is not None
    return Difference(
        engine=name,
        dtype=dtype,
        sampling=sampling.name,
        num_tokens=int(mask.sum()),
        mean=figures["rollout_corr/log_prob_diff_mean"],
        max=figures["rollout_corr/log_prob_diff_max"],
        kl=figures["rollout_corr/kl"],
        k3_kl=figures["rollout_corr/k3_kl"],
        prompt=worst.row,
        place=worst.column,
        token=tokenizer.decode([int(tensors["responses"][worst.row, worst.column])]),
        engine_log_prob=worst.rollout,
        trainer_log_prob=worst.trainer,
    )


def make_trainer(config: DictConfig, device: torch.device) -> TrainEngine[PolicyModel]:
    """The policy as it is trained, in the precision of training."""
    fsdp_config = config.actor_rollout_ref.actor.fsdp_config
    precision = Precision.from_config(fsdp_config, device)
    return TrainEngine(
        load_policy(config.actor_rollout_ref.model, precision.model), precision, fsdp_config, device
    )


def make_engine(
    name: str,
    dtype: torch.dtype,
    config: DictConfig,
    trainer: TrainEngine[PolicyModel],
    rows: int,
) -> RolloutEngine:
    """The engine of that name for the trainer's model."""
    rollout, model = config.actor_rollout_ref.rollout.copy(), config.actor_rollout_ref.model
    if name == "transformers":
        length, device = rollout.prompt_length, trainer.device
        return TransformersEngine(load_hf_config(model), rows, length, dtype, device, model.trust_remote_code)
    rollout.name, rollout.placement = {
        "native": ("native", "colocated"),
        "vllm": ("vllm", "colocated"),
        "vllm-apart": ("vllm", "apart"),
    }[name]
    request = Request(trainer.device, dtype, rollout.prompt_length, rows)
    return build_engine(rollout, model, request)


def differences(arguments: argparse.Namespace) -> Iterator[Difference]:
    """All lines of the table, each as soon as it is known.

    ValueError for a user's mistake, EngineUnavailable for a server that does not start.
    """
    config = configuration(arguments)
    model = config.actor_rollout_ref.model
    tokenizer = AutoTokenizer.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    prompts = load_prompts(arguments, config, tokenizer)
    trainer = make_trainer(config, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    for name in arguments.engines:
        for dtype in arguments.dtypes:
            engine = make_engine(name, DTYPES[dtype], config, trainer, len(prompts))
            try:
                engine.update_weights(trainer.weights(), version=0)
                for sampling in samplings(arguments.temperature, arguments.top_p):
                    trajectories = sample(engine, prompts, sampling, arguments.turns, arguments.max_tokens)
                    yield difference(name, dtype, sampling, to_batch(trajectories), trainer, tokenizer)
            finally:
                engine.shutdown()


def samplings(temperature: float, top_p: float) -> list[Sampling]:
    """The three ways of sampling; see the top of the file."""
    return [
        Sampling("temperature 1", 1.0, 1.0, "log_probs", 1.0),
        Sampling(f"temperature {temperature:g}", temperature, 1.0, "log_probs", temperature),
        Sampling(f"temperature {temperature:g}, top-p {top_p:g}", temperature, top_p, "model_log_probs", 1.0),
    ]


def configuration(arguments: argparse.Namespace) -> DictConfig:
    """A training run's configuration for this model."""
    path = str(Path(arguments.model).expanduser()).replace("'", "\\'")
    rollout = "actor_rollout_ref.rollout"
    overrides = [
        f"actor_rollout_ref.model.path='{path}'",
        f"actor_rollout_ref.model.trust_remote_code={arguments.trust_remote_code}",
        f"actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype={arguments.trainer_dtype}",
        f"data.max_prompt_length={arguments.max_length}",
        f"data.max_start_length={arguments.max_length // 2}",
        "data.truncation=left",
    ]
    if arguments.vllm_python is not None:
        overrides.append(f"{rollout}.vllm.python='{arguments.vllm_python}'")
    return load_config(overrides)


def load_prompts(arguments: argparse.Namespace, config: DictConfig, tokenizer: Any) -> list[list[int]]:
    """Token ids of the first prompts of the parquet file, by default of a microworld's test questions."""
    with tempfile.TemporaryDirectory() as folder:
        file = arguments.data
        if file is None:
            count = max(2, arguments.num_prompts)
            write_world(arguments.seed, Path(folder), num_train=2, num_test=count, num_3hop=2)
            file = str(Path(folder) / "test.parquet")
        dataset = RLHFDataset(file, tokenizer, config.data)
    return [dataset[i]["raw_prompt_ids"] for i in range(min(arguments.num_prompts, len(dataset)))]


def table(rows: Sequence[Difference]) -> str:
    """The lines as aligned text."""
    head = ["engine", "dtype", "sampling", "tokens", "mean", "max", "kl", "k3", "worst: prompt, place, token"]
    cells = [[*head, "engine", "trainer"]]
    for row in rows:
        figures = [f"{value:.2e}" for value in (row.mean, row.max, row.kl, row.k3_kl)]
        worst = f"{row.prompt}, {row.place}, {row.token!r}"
        both = [f"{row.engine_log_prob:.5f}", f"{row.trainer_log_prob:.5f}"]
        cells.append([row.engine, row.dtype, row.sampling, str(row.num_tokens), *figures, worst, *both])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    )


def parser() -> argparse.ArgumentParser:
    """The command line."""
    text = __doc__ or ""
    options = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = options.add_argument
    add(
        "--model",
        default=str(ROOT / "data_prep" / "base_model"),
        help="Hugging Face folder (the shipped one)",
    )
    add("--engines", type=_names(ENGINES), help=f"any of {','.join(ENGINES)} (default: those installed)")
    add(
        "--dtypes",
        type=_names(("float32", "bfloat16")),
        default=["float32", "bfloat16"],
        help="of the engines",
    )
    add(
        "--trainer-dtype",
        choices=["fp32", "bf16", "null"],
        default="null",
        help="of the trainer's computation",
    )
    add("--data", help="parquet file with prompts (default: questions of a microworld)")
    add("--seed", type=int, default=0, help="of the microworld")
    add("--num-prompts", type=int, default=16)
    add("--turns", type=int, default=2, help="per prompt")
    add("--max-tokens", type=int, default=32, help="sampled per turn")
    add("--max-length", type=int, default=512, help="of a whole trajectory, in tokens")
    add("--temperature", type=float, default=0.7)
    add("--top-p", type=float, default=0.9)
    add("--vllm-python", help="interpreter with vLLM, for vllm-apart")
    add("--trust-remote-code", action="store_true")
    add("--json", action="store_true", help="print JSON instead of a table")
    return options


def _names(known: Sequence[str]) -> Any:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"found {unknown[0]!r}, expected any of {', '.join(known)}")
        return names

    return parse


def main() -> None:
    arguments = parser().parse_args()
    if arguments.engines is None:
        present = {"vllm": importlib.util.find_spec("vllm"), "vllm-apart": arguments.vllm_python}
        arguments.engines = [name for name in ENGINES if present.get(name, True)]
    rows = []
    try:
        for row in differences(arguments):
            rows.append(row)
            print(f"{row.engine} {row.dtype}, {row.sampling}: done", file=sys.stderr)
    except (ValueError, EngineUnavailable) as error:
        sys.exit(f"error: {error}")
    print(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) if arguments.json else table(rows))


if __name__ == "__main__":
    main()
