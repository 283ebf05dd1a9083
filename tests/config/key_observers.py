"""What a run does with a configuration, as values that can be compared. Each observer looks at real objects:

driver      a whole run of the trainer: every call of its workers, what it prints, and its files
actor       two updates of a tiny policy: metrics, weights, and how it is held; `critic` likewise
plan        who goes where on GPUs of 80 GiB, and the memory of each phase
agent, engine, vllm, checks, ...    what is built, or refused
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import tempfile
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import torch
from instant_runs import Critic, Policy, numbers
from rollout_observers import rollout_process, stream, uploads, weights_sent  # noqa: F401
from safetensors.torch import load_file, save_file
from tiny_training import make_actor, make_batch, make_critic
from transformers import AutoTokenizer
from verifier_observers import judged, patience, verdicts  # noqa: F401

from search_r1.llm_agent.generation import build_agent
from search_r1.search.probe import RetrievalProbe
from verl.agent.codec import Codec
from verl.agent.trajectory import AgentConfig
from verl.checkpoints.run_state import RunStopped
from verl.config import Config, replace_values
from verl.environments.environment import BaseTextEnv, EpisodeFailed
from verl.environments.executors import Environments
from verl.planning.hardware import Hardware
from verl.planning.memory_plan import Plan, report
from verl.planning.passes import Passes
from verl.planning.placement import decide_machine_settings, needs_ray, processes_on_nodes, roles_of
from verl.preflight.machine_checks import find_wrong_corpora
from verl.preflight.preflight import passes_quick_checks, run_preflight
from verl.preflight.target import Target
from verl.protocol import DataProto, object_array
from verl.records import recorder
from verl.trainer import main_ppo, restarts
from verl.trainer.config import validate
from verl.trainer.main_ppo_format import format_score
from verl.trainer.ppo.episodes import FailureWatch
from verl.utils.reward_score.qa_em_format import Segment
from verl.workers.engine.loading import load_hf_config
from verl.workers.engine.update_loop import MicroBatchLimits
from verl.workers.megatron_workers import sizes_of
from verl.workers.rollout import build

BASE_MODEL = Path(__file__).resolve().parents[2] / "data_prep" / "base_model"
CPU = torch.device("cpu")
VOLATILE = re.compile(r"timing|perf/|seconds|per_second|version")
calls: list[Any] = []


def digest(data: DataProto) -> Any:
    """Of a batch: shapes, sums in which the place of a value counts, prompts, and plain settings."""
    tensors = {
        name: (list(x.shape), float((x.double().flatten() * torch.arange(1, x.numel() + 1)).sum()))
        for name, x in data.tensors.items()
    }
    prompts = [str(ids) for ids in data.non_tensor_batch.get("raw_prompt_ids", [])]
    return tensors, prompts, plain(data.meta_info)


def plain(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value for name, value in values.items() if isinstance(value, bool | int | float | str | list)
    }


def noted(worker: type) -> type:
    """The worker class with every call written down, made with whatever arguments a real one gets."""

    def wrap(name: str, method: Any) -> Any:
        def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
            batches = [digest(each) if isinstance(each, DataProto) else str(each) for each in arguments]
            calls.append((worker.__name__, name, batches, keywords))
            return method(self, *arguments, **keywords)

        call.__dict__.update(method.__dict__)  # how its arguments are dealt out
        return call

    methods = {
        name: wrap(name, getattr(worker, name))
        for name in dir(worker)
        if name.startswith(("generate", "compute_", "update_", "reset", "save_", "start"))
    }
    return type(worker.__name__, (worker,), methods)


class NotedPolicy(Policy):
    """Of each batch row 0's search fails and row 1 is cut, and every second one counts as a single search;
    every update counts as skipped.
    """

    def __init__(self, block: Any, role: str, agent_factory: Any, device: str, seed: int) -> None:
        super().__init__(width=320)

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        long = [(list(ids) * 100)[:100] for ids in prompts.non_tensor_batch["raw_prompt_ids"]]
        columns = prompts.non_tensor_batch | {"raw_prompt_ids": object_array(long)}
        made = Policy.generate_sequences(self, DataProto(prompts.batch, columns, prompts.meta_info))
        if len(made) > 2 and not prompts.meta_info.get("validate"):
            records = made.non_tensor_batch["trajectory"]
            records[0]["finish_reason"] = "search_failed"
            records[1]["finish_reason"] = "length"
            made.tensors["response_mask"][0] = 0
            for record in records[::2]:
                record["num_searches"] = 1
        tokens = made.tensors["input_ids"][:, -made.tensors["response_mask"].shape[1] :]
        shift = 0.8 * (tokens % 2) * made.tensors["response_mask"]  # of some tokens the engine is surer
        made.tensors["rollout_log_probs"] = numbers(made, -0.9) + shift
        return made

    generate_sequences.__dict__.update(Policy.generate_sequences.__dict__)

    def compute_log_prob(self, data: DataProto) -> DataProto:
        log_probs = numbers(data, -0.5)
        extra = {"sum_pi_squared": log_probs.exp()} if data.meta_info.get("calculate_sum_pi_squared") else {}
        return DataProto.from_dict({"old_log_probs": log_probs} | extra)

    compute_log_prob.__dict__.update(Policy.compute_log_prob.__dict__)

    def reset_reference(self) -> None:
        pass

    reset_reference.__dict__.update(Policy.sync_weights.__dict__)

    def update_actor(self, data: DataProto) -> DataProto:
        done = Policy.update_actor(self, data)
        done.meta_info["metrics"]["actor/num_skipped_in_a_row"] = 3.0
        return done

    update_actor.__dict__.update(Policy.update_actor.__dict__)


class NotedCritic(Critic):
    def __init__(self, *arguments: Any) -> None:
        super().__init__()


def write_questions(folder: Path) -> None:
    """train.parquet, other.parquet with another order, and reward.py."""
    rows = [
        {
            "data_source": "nq" if i % 2 else "hotpotqa",
            "prompt": [{"role": "user", "content": f"Who named lake {i}?"}],
            "question": [{"role": "user", "content": f"Lake {i}: who?"}],
            "reward_model": {"style": "rule", "ground_truth": {"target": ["Oslo"]}},
            "extra_info": {"index": i, "question": f"Who named lake {i}?"},
        }
        for i in range(12)
    ]
    pd.DataFrame(rows).to_parquet(folder / "train.parquet")
    pd.DataFrame(rows[::-1]).to_parquet(folder / "other.parquet")
    (folder / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    turns = {'turn_rewards': [len(solution_str) % 5, 0.2, 0.3]}\n"
        "    length = len(solution_str)\n"
        "    return {'score': length % 7 / 7, 'format': length % 3, 'same': 1} | turns\n"
        "def other(data_source, solution_str, ground_truth, extra_info):\n    return 0.5\n"
        "def unsure(data_source, solution_str, ground_truth, extra_info):\n"
        "    return None if extra_info['index'] % 4 == 0 else 0.5\n"
    )


def write_other_model(source: Path, folder: Path) -> None:
    """The same model with other weights."""
    shutil.copytree(source, folder)
    weights = load_file(folder / "model.safetensors")
    save_file({n: x + 0.05 for n, x in weights.items()}, folder / "model.safetensors", {"format": "pt"})


def driver(config: Config) -> Any:
    """A whole run of the real trainer over workers that answer at once."""
    config = replace_values(config, {"trainer.device": "cpu", "trainer.backend": "local"})
    folder = Path(config.trainer.default_local_dir)
    calls.clear()
    printed = io.StringIO()
    ended = ""
    display = ""
    trainer = None
    classes = main_ppo.worker_classes
    draw = recorder.draw_curves
    main_ppo.worker_classes = lambda _: (noted(NotedPolicy), noted(NotedCritic))
    recorder.draw_curves = lambda *_: None  # a picture of the metrics, which takes most of the time
    try:
        with contextlib.redirect_stdout(printed):
            trainer = main_ppo.build_trainer(config)
            trainer.init_workers()
            trainer.fit()
    except (ValueError, RunStopped) as error:
        ended = str(error)
    finally:
        main_ppo.worker_classes = classes
        recorder.draw_curves = draw
        if trainer is not None:
            display = type(trainer.recorder.display).__name__
            trainer.shutdown()
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) if folder.is_dir() else []
    counts = [len(path.read_text().splitlines()) for path in sorted(folder.rglob("*.jsonl"))]
    rows = []
    if (folder / "metrics.jsonl").is_file():
        for line in (folder / "metrics.jsonl").read_text().splitlines():
            rows.append({k: v for k, v in json.loads(line).items() if not VOLATILE.search(k)})
    shown = printed.getvalue()
    text = json.dumps([str(calls), ended, rows, counts, display, shown.count("\n")])
    return text, [str(folder), *files]


def _weights(engine: Any) -> Any:
    sums = [
        (n, str(p.dtype), p.requires_grad, float(p.double().abs().sum()))
        for n, p in engine.module.named_parameters()
    ]
    model = engine.module.model
    return sums, bool(getattr(model, "is_gradient_checkpointing", False))


def actor(config: Config) -> Any:
    """Two updates of a tiny policy, and how the worker's passes are cut."""
    config = replace_values(config, {"actor_rollout_ref.actor.optim.total_training_steps": 4})
    block = config.actor_rollout_ref
    limits = [
        MicroBatchLimits.from_config(part, "log_prob", CPU, not block.model.use_remove_padding)
        for part in (block.ref, block.rollout)
    ]
    try:
        policy = make_actor(config)
    except (ValueError, OSError, ImportError) as error:
        return type(error).__name__
    metrics = [policy.update_policy(make_batch()) for _ in range(2)]
    return metrics, _weights(policy.engine), policy.limits, limits


def critic(config: Config) -> Any:
    """Two updates of a tiny critic."""
    trained = make_critic(replace_values(config, {"critic.optim.total_training_steps": 4}))
    metrics = [trained.update_critic(make_batch()) for _ in range(2)]
    return metrics, _weights(trained.engine), trained.loop.limits


def plan(config: Config) -> Any:
    config = replace_values(config, {"trainer.device": "cuda", "trainer.dry_run_gpu_memory_gb": 80})
    made = Plan(config, Hardware.of(config))
    return list(report(made)), [(load.host_bytes, load.items) for load in made.loads]


def agent(config: Config) -> Any:
    """The agent of the run and its search client; the environment names a proxy that can't be used."""
    tokenizer = AutoTokenizer.from_pretrained(BASE_MODEL)
    no_engine = SimpleNamespace()
    kept = os.environ.get("http_proxy")
    os.environ["http_proxy"] = "ftp://127.0.0.1:1"
    try:
        made = build_agent(config, tokenizer, no_engine, api_key="")  # type: ignore[arg-type]
    except ValueError as error:
        return str(error)
    finally:
        os.environ.pop("http_proxy") if kept is None else os.environ.update(http_proxy=kept)
    try:
        return repr(made.config), None if made.search_client is None else plain(vars(made.search_client))
    finally:
        made.close()


class Observed(BaseTextEnv):
    """Says where it runs and what it was made with."""

    def __init__(self, env_config: Any, extras: Any) -> None:
        super().__init__()
        self.made_with = dict(env_config)

    def step(self, action: str) -> Any:
        time.sleep(0.2)
        reward = float(threading.current_thread() is threading.main_thread())
        return {"observations": [], "reward": reward, "done": True, "metadata": self.made_with}


class Other(Observed):
    pass


def environments(config: Config) -> Any:
    """Two episodes of the run's environment, and what becomes of a batch in which one of four failed."""
    name = config.environment.env_class
    stage = Environments(config.environment)
    tokenizer = AutoTokenizer.from_pretrained(BASE_MODEL)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    codec = Codec(tokenizer, AgentConfig(1, 2, 3, 4, 5), config.environment.observation_format)
    opened = [stage[name].open({}, [], 3) for _ in range(2)]
    episodes = [each.result() if isinstance(each, Future) else each for each in opened]
    started = time.perf_counter()
    outcomes = []
    for each in stage[name].step_many(episodes, ["x", "y"]):
        try:
            outcomes.append(each.result() if isinstance(each, Future) else each)
        except EpisodeFailed as error:
            outcomes.append(str(error))
    seconds = round((time.perf_counter() - started) * 5)  # 1 side by side, 2 one after the other
    failed = {"finish_reason": "env_failed", "turns": [], "env_error": "?", "env_class": name}
    records = [failed, *[{"finish_reason": "done", "turns": [], "env_class": name}] * 3]
    try:
        FailureWatch(config, str).check(records)
        ended = "goes on"
    except RunStopped as error:
        ended = str(error)
    return name, outcomes, seconds, codec.is_chat(name), ended


def engine(config: Config) -> Any:
    """The native engine on CPU."""
    block = config.actor_rollout_ref
    dtype = build.rollout_dtype(block.rollout, torch.float32)
    name = build.engine_name(block.rollout, "cpu")
    if name != "native":
        return name
    made = build.build_rollout_engine(block.rollout, block.model, build.EngineRequest(CPU, dtype, 64, 2000))
    return dtype, made.max_num_seqs, made.num_blocks  # type: ignore[attr-defined]


def vllm(config: Config) -> Any:
    """What vLLM would be started with, on CUDA."""
    block = config.actor_rollout_ref
    request = build.EngineRequest(torch.device("cuda"), torch.bfloat16, 64, 2000)
    return build._vllm_arguments(block.rollout, block.model, load_hf_config(block.model), request)


def checks(config: Config) -> Any:
    """What is said of it before anything starts."""
    try:
        validate(config)
    except ValueError as error:
        return str(error)
    return "valid"


def workers(config: Config) -> Any:
    return [worker.__module__ for worker in main_ppo.worker_classes(config)]


def cut(config: Config) -> Any:
    return sizes_of(config.actor_rollout_ref.actor.megatron)


def placed(config: Config) -> Any:
    ray = needs_ray(config)
    kept = torch.cuda.device_count
    torch.cuda.device_count = lambda: 1
    try:
        if not ray:
            config = decide_machine_settings(config)
    finally:
        torch.cuda.device_count = kept
    return ray, config.trainer.device, processes_on_nodes(config), roles_of(Passes(config))


def hub(config: Config) -> Any:
    """How the model's configuration is asked for."""
    asked: list[Any] = []

    def from_pretrained(*arguments: Any, **keywords: Any) -> Any:
        asked.append((arguments, keywords))
        raise OSError("none")

    from verl.workers.engine import loading

    kept = loading.AutoConfig
    loading.AutoConfig = SimpleNamespace(from_pretrained=from_pretrained)  # type: ignore[misc, assignment]
    try:
        with contextlib.suppress(ValueError):
            load_hf_config(config.actor_rollout_ref.model)
    finally:
        loading.AutoConfig = kept  # type: ignore[misc]
    return asked


def structure(config: Config) -> Any:
    """Rewards of main_ppo_format for a wrong answer in good form, with a good document, and in bad form."""
    score = format_score(config)
    document = Segment("\n\n<information>Oslo</information>\n\n", sampled=False)
    good = Segment("<think> a </think><search> b </search>", sampled=True)
    end = Segment("<think> c </think><answer> Rome </answer>", sampled=True)
    bad = Segment("<answer> Rome </answer> and more", sampled=True)
    rewards = []
    for segments in ([good, document, end], [bad]):
        text = "".join(segment.text for segment in segments)
        rewards.append(score("nq", text, {"target": ["Oslo"]}, {"segments": segments}))
    return rewards


def corpora(config: Config) -> Any:
    return list(find_wrong_corpora(Target(config, RetrievalProbe())))


def start(config: Config) -> Any:
    """Which checks a run makes at its start."""
    try:
        passes_quick_checks(config)
    except ValueError as error:
        return str(error)
    return run_preflight(Target(config, at_start=True), skip=config.trainer.doctor_skip).checks


def restart(config: Config) -> Any:
    """What the run does when a worker dies, and how long it waits for room."""
    pool = SimpleNamespace(timeout_seconds=0)
    config = replace_values(config, {"trainer.backend": "ray"})
    with tempfile.TemporaryDirectory() as folder:
        trainer: Any = SimpleNamespace(
            shutdown=lambda: None,
            init_workers=lambda: None,
            resume_folder=None,
            checkpoints=SimpleNamespace(last_written=None, run_dir=Path(folder)),
            resource_pool_manager=SimpleNamespace(resource_pool_dict={"": pool}),
        )
        run = restarts.RestartingRun(config, lambda _: trainer)
        run.trainer = trainer
        try:
            run._handle_failure(RuntimeError("a worker died"))
            run.start()
        except RunStopped as error:
            return str(error)
    return pool.timeout_seconds


def rewind(config: Config) -> Any:
    """How often a run may go back to before a collapse."""
    with tempfile.TemporaryDirectory() as folder:
        trainer: Any = SimpleNamespace(
            config=config,
            resume_folder=None,
            rewinds_left=0,
            checkpoints=SimpleNamespace(run_dir=Path(folder)),
        )
        trainer.init_workers = lambda: trainer.when_folder_is_taken()
        restarts.RestartingRun(config, lambda _: trainer).start()
    return trainer.rewinds_left


def program(config: Config) -> Any:
    """The program itself, as far as it gets without rows."""
    line = [f"{path}={value}" for path, value in PROGRAM.items()]
    line += [f"trainer.dry_run={str(config.trainer.dry_run).lower()}"]
    line += [f"trainer.dry_run_gpu_memory_gb={config.trainer.dry_run_gpu_memory_gb or 'null'}"]
    out = io.StringIO()
    err = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main_ppo.run(line)
    return status, out.getvalue(), err.getvalue()


PROGRAM = {"actor_rollout_ref.model.path": BASE_MODEL, "data.train_files": "/no/rows.parquet"}
