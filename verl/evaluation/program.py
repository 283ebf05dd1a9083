"""Measure a model: `python -m verl.evaluation` (docs/evaluation.md).

    python -m verl.evaluation --model RUN --steps 100,200 --benchmarks data/quickstart/test.parquet
    python -m verl.evaluation --base_url http://127.0.0.1:8001/v1 --model NAME --benchmarks questions.jsonl

    rows of a file -> the agent, environments and verifiers of training -> OUT/MODEL/BENCHMARK/results.jsonl

Arguments key=value and @file at the end are settings of training (`bash train_grpo.sh --help`): lengths,
max_turns, retriever.url, environment, verifiers. A checkpoint has the settings of its run; other models have
Search-R1's.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx

from verl.config import Config, Loaded, replace_values
from verl.config.keys import flatten
from verl.config.loading import VARIABLE_PREFIX, load
from verl.config.mixture import OWN, RETRIEVERS, SHUFFLED
from verl.data.remote_rows import fetch_rows, is_remote
from verl.evaluation.results import check_results
from verl.monitor.runs import state_of
from verl.plugins import hook
from verl.utils.announcing import announce, gc_paused
from verl.utils.hub import use_cache_if_hub_is_away
from verl.utils.model_folders import (
    ASKED_WITH,
    check_model_is_whole,
    find_model,
    run_folder,
    search_address,
)
from verl.utils.text import printable

if TYPE_CHECKING:
    from verl.agent.agent import EnvironmentAgent
    from verl.evaluation.rollouts import Benchmark

# Search-R1's settings, for models without a run.
DEFAULTS = {"max_turns": 4, "retriever.topk": 3, "data.max_start_length": 2048, "data.max_obs_length": 500}
DEFAULTS |= {"data.max_prompt_length": 4096, "data.max_response_length": 500}
WATCH_SECONDS = 5.0
BENCHMARKS = Path("data/benchmarks")  # the rows of benchmarks that are given by name
# The options (RESULT_OPTIONS) and the settings (RESULT_SETTINGS) on which results depend: --resume goes on
# with results that have the same.
RESULT_OPTIONS = ("n", "rollouts", "temperature", "seed", "tokenizer", "category", "similarity", "encoder")
RESULT_SETTINGS = (
    "max_turns",
    "do_search",
    "environment.",
    "verifiers.",
    "custom_reward_function.",
    "retriever.topk",
    "data.max_",
    "data.prompt_key",
    "data.truncation",
    "actor_rollout_ref.rollout.dtype",
)


def build_parser(prog: str, about: str | None, out: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog, description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--model",
        required=True,
        help="run, Hugging Face folder or hub name; with --base_url its name there",
    )
    names = "files of rows (.parquet, .jsonl), or names (docs/evaluation.md), a,b"
    add("--benchmarks", default="", help=names)
    add("--out", type=Path, default=Path(out), help=f"results: OUT/MODEL/BENCHMARK ({out})")
    add("--resume", action="store_true", help="go on with the results that are there")
    add("-n", type=int, help="examples of each benchmark, drawn with a fixed seed (all)")
    add("--rollouts", type=int, default=1, help="of each example (%(default)s)")
    add("--temperature", type=float, help="0: greedy (0 with one rollout, else 1)")
    add("--seed", type=int, default=0)
    add("--concurrency", type=int, default=128, help="rollouts under way at once (128)")
    add("--solved_at", type=float, default=1.0, help="reward of a solved rollout, for pass@j (1)")
    add("--similarity", action="store_true", help="compare long answers: ROUGE-L, token F1, Jaccard, BLEU")
    add("--encoder", help="with --similarity: folder or name of a text encoder, for the answers' cosine")
    add("--category", help="tell figures by this name in extra_info (the data source)")
    add("--steps", help="of a run: 100,200 or all (the newest)")
    add("--watch", action="store_true", help="each checkpoint of a run as it comes, until the run is over")
    add("--base_url", help="of a server with OpenAI's API: http://host:port/v1")
    add("--tokenizer", help="with --base_url: the model's folder, for servers that take and give token ids")
    add("--api_key_var", default="OPENAI_API_KEY", help="environment variable with the server's key")
    add("--timeout", type=float, default=300.0, help="seconds of a request to --base_url (300)")
    add("--patience", type=float, default=1800.0, help="seconds of a turn with all its requests (1800)")
    add("--prices", default="0,0", help="US dollars per million tokens read,written")
    add("--servers", action="store_true", help="only say which servers it asks that have no address yet")
    add("settings", nargs="*", metavar="key=value", help="settings of training, @file too")
    parser.set_defaults(retriever=OWN)
    return parser


def read_options(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; a mistake in it ends the program with status 2."""
    options = parser.parse_intermixed_args(argv)
    if options.temperature is None:
        options.temperature = float(options.rollouts > 1)
    names = [name for name in options.benchmarks.split(",") if name]
    for name in ("rollouts", "concurrency", "n"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name}: found {value}, expected 1 or more")
    if options.temperature < 0:
        parser.error(f"--temperature: found {options.temperature}, expected 0 or more")
    try:
        options.prices = tuple(float(price) for price in options.prices.split(","))
    except ValueError:
        options.prices = ()
    if len(options.prices) != 2:
        parser.error("--prices: expected two numbers, as 0.4,1.6")
    if options.base_url is None:
        if options.tokenizer is not None:
            parser.error("--tokenizer: expected only with --base_url; a folder has its own")
    elif options.steps or options.watch:
        parser.error("--steps and --watch: expected only with a run's folder as --model")
    elif not options.base_url.startswith(("http://", "https://")):
        parser.error(f"--base_url: found {options.base_url}, expected http://host:port/v1")
    options.retrievers = list(dict.fromkeys(name for name in options.retriever.split(",") if name))
    if not options.retrievers or not set(options.retrievers) <= set(RETRIEVERS):
        parser.error(
            f"--retriever: found {options.retriever!r}, expected one or more of {','.join(RETRIEVERS)}"
        )
    check_folder_or_name(parser, "--tokenizer", options.tokenizer)
    check_folder_or_name(parser, "--encoder", options.encoder)
    if options.steps not in (None, "all") and not re.fullmatch(r"\d+(,\d+)*", options.steps):
        parser.error(f"--steps: found {options.steps}, expected all, or numbers as 100,200")
    try:
        options.benchmarks = [file for name in names for file in benchmark_files(name)]
    except ValueError as error:
        parser.error(f"--benchmarks: {error}")
    stems = [path.stem for path in options.benchmarks]
    for path in options.benchmarks:
        if not path.is_file() or path.suffix not in (".parquet", ".jsonl"):
            parser.error(f"--benchmarks: found {path}, expected a file of rows, .parquet or .jsonl")
        if stems.count(path.stem) > 1:
            parser.error(f"--benchmarks: found two files named {path.stem}; their results have one place")
    return options


def benchmark_files(name: str) -> list[Path]:
    """Return the files of a benchmark: one of this machine, copies of those at s3:// and the like, or named.

    Raises ValueError if they can't be had.
    """
    if is_remote(name):
        return fetch_rows(name)
    if "." in name or "/" in name:
        return [Path(name).expanduser()]
    return [hook("benchmark_file")(name, BENCHMARKS)]


def check_folder_or_name(parser: argparse.ArgumentParser, option: str, value: str | None) -> None:
    """End the program with status 2 if a value is no folder, and can be no model's name on a hub."""
    if value is None or Path(value).expanduser().is_dir():
        return
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", value):
        parser.error(f"{option}: found {value}, expected a folder, or a model's name on the hub")


def folders_of(options: argparse.Namespace) -> Iterator[Path]:
    """Yield the models' folders: one, or those of a run's checkpoints, with --watch as they come.

    Raises ValueError if the folder, or a checkpoint that is asked for, is not there.
    """
    run = Path(options.model).expanduser()
    if not options.steps and not options.watch:
        folder = Path(find_model(options.model))
        yield folder if folder.is_dir() else hook("fetch_model")(options.model)
        return
    if not run.is_dir():
        raise ValueError(f"--model: found no folder {run}; expected a run's, for --steps and --watch")
    steps_wanted = [int(step) for step in (options.steps or "all").split(",") if step != "all"]
    seen: set[int] = set()
    while True:
        is_over = not options.watch or state_of(run) != "running"  # asked before looking at what is there
        checkpoints = {
            int(path.parents[2].name.removeprefix("global_step_")): path.parent
            for path in run.glob("global_step_*/actor/huggingface/config.json")
            if run_folder(path.parent)
        }
        for step in sorted(checkpoints.keys() - seen):
            seen.add(step)
            # A checkpoint may be pruned by now.
            if (not steps_wanted or step in steps_wanted) and checkpoints[step].is_dir():
                check_model_is_whole(checkpoints[step])
                yield checkpoints[step]
        if is_over:
            break
        time.sleep(WATCH_SECONDS)
    missing = sorted(set(steps_wanted) - seen)
    if missing or not seen:
        steps_found = ", ".join(map(str, sorted(seen))) or "none"
        raise ValueError(
            f"{run} has the checkpoints: {steps_found}; expected {missing or 'at least one'} (--steps)"
        )


def relative_results_path(folder: Path | None, model: str) -> Path:
    """Return a model's place below --out.

    It is RUN/global_step_N, the name of its folder, or a name as organisation--model.
    """
    if folder is None or not Path(model).expanduser().is_dir():
        return Path(model.replace("/", "--"))
    run = run_folder(folder)
    if run is None:
        return Path(folder.resolve().name)
    return Path(run.name) / folder.resolve().parents[1].name


class LoadedSettings(NamedTuple):
    """The settings of a model, and where they are from.

    Attributes:
        loaded: its run's, or Search-R1's, with those of the command line on top.
        file_of_run: the config.yaml of its run; None without one.
        origin: what they are from, for people.
    """

    loaded: Loaded
    file_of_run: str | None
    origin: str

    @property
    def names_search_server(self) -> bool:
        """Return whether somebody has named the search server for this command: not a run in its file."""
        return self.loaded.origins["retriever.url"] not in ("default", self.file_of_run)


def load_settings(folder: Path | None, options: argparse.Namespace) -> LoadedSettings:
    """Load the settings of a model. Raise ValueError if they are wrong."""
    run = None if folder is None else run_folder(folder)
    candidates = [parent / "config.yaml" for parent in (run, folder) if parent is not None]
    of_run = [f"@{file}" for file in candidates if file.is_file()][:1]
    defaults = dict(DEFAULTS)
    file_of_run = of_run[0].removeprefix("@") if of_run else None
    origin = file_of_run or "defaults, as there is no run's config.yaml"
    if options.base_url is not None and (of_server := settings_of_server(options)):
        defaults |= of_server
        origin = f"the run of {options.model}, as {options.base_url} says"
    weakest = {VARIABLE_PREFIX + name.replace(".", "__"): str(value) for name, value in defaults.items()}
    loaded = load([*of_run, *options.settings], environment=weakest | os.environ)
    return LoadedSettings(loaded, file_of_run, origin)


def settings_of(folder: Path | None, options: argparse.Namespace) -> Config:
    """Return the settings of a model: its run's, or Search-R1's, with those of the command line on top.

    A line on stderr says which they are, and where they are from. If the command line does not name a search
    server, it is found as infer.py finds it (`search_address`).

    Raises ValueError if they are wrong.
    """
    settings = load_settings(folder, options)
    origin = settings.origin
    config: Config = settings.loaded.config
    origin_of_url = settings.loaded.origins["retriever.url"]
    if not settings.names_search_server:
        url_of_run = None if origin_of_url == "default" else config.retriever.url
        run = None if folder is None else run_folder(folder)
        is_running = run is not None and state_of(run) == "running"
        url, origin_of_url = search_address(url_of_run, is_running)
        config = replace_values(config, {"retriever.url": url})
    values = flatten(config)
    shown = " ".join(f"{name}={values[name]}" for name in ASKED_WITH if values.get(name) is not None)
    line = f"asks with {shown} (from {origin}, and the command line)"
    if config.do_search:
        line += f"; searches at {config.retriever.url} ({origin_of_url})"
    print(printable(line), file=sys.stderr, flush=True)
    return config


def settings_of_server(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of its model's run that a server of ours tells, or {} of any other server.

    Raises ValueError if no server listens there.
    """
    key = os.environ.get(options.api_key_var)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        reply = httpx.get(f"{options.base_url.rstrip('/')}/models", headers=headers, timeout=10.0)
    except httpx.ConnectError as error:
        raise ValueError(
            f"--base_url: found nothing that answers at {options.base_url} ({error}); expected a server with "
            "OpenAI's API. Start it, or correct the address."
        ) from None
    except (httpx.HTTPError, httpx.InvalidURL):
        return {}
    try:
        cards = reply.json()["data"]
        settings = next(card["run_settings"] for card in cards if card["id"] == options.model)
        return {
            name: settings[name]
            for name in ASKED_WITH
            if type(settings.get(name)) in (int, bool)  # whoever answers there may not set more than that
        }
    except (StopIteration, ValueError, LookupError, TypeError, AttributeError):
        return {}


@contextmanager
def agent_of(folder: Path | None, config: Config, options: argparse.Namespace) -> Iterator[EnvironmentAgent]:
    """Provide the agent of training over a loaded model, or over a server.

    Raises ValueError or EngineUnavailable if the model can't be used.
    """
    import torch

    from verl.evaluation.api_engine import ApiEngine, MessageTokenizer
    from verl.sessions.engine_contract import RolloutEngine
    from verl.utils import check_token_ids, hf_tokenizer
    from verl.utils.device import get_device_name
    from verl.utils.safetensors_file import read_weights
    from verl.workers.engine.loading import load_hf_config
    from verl.workers.rollout.build import EngineRequest, build_rollout_engine, rollout_dtype

    path = options.tokenizer if folder is None else str(folder)
    config = replace_values(config, {"actor_rollout_ref.model.path": path})
    rollout = config.actor_rollout_ref.rollout
    model = config.actor_rollout_ref.model
    length = config.data.max_prompt_length
    tokenizer: Any
    if options.base_url is None:
        assert folder is not None
        device = torch.device(get_device_name())
        tokenizer = hf_tokenizer(str(folder), False, trust_remote_code=model.trust_remote_code)
        check_token_ids(tokenizer, load_hf_config(model).get_text_config().vocab_size, str(folder))
        dtype = rollout_dtype(rollout, torch.bfloat16 if device.type == "cuda" else torch.float32)
        engine: RolloutEngine[Any] = build_rollout_engine(
            rollout, model, EngineRequest(device, dtype, length, options.concurrency)
        )
        engine.load_weights(read_weights(folder), 0)
    else:
        messages = None if options.tokenizer else MessageTokenizer()
        use_cache_if_hub_is_away({"--tokenizer": options.tokenizer or ""})
        tokenizer = messages or hf_tokenizer(options.tokenizer, correct_pad_token=False)
        engine = ApiEngine(
            options.base_url,
            options.model,
            messages=messages,
            max_model_len=length,
            concurrency=options.concurrency,
            api_key=os.environ.get(options.api_key_var),
            timeout=options.timeout,
            patience=options.patience,
        )
    with ExitStack() as stack:
        stack.callback(engine.shutdown)
        build_agent = hook("agent_factory")(config)
        yield stack.enter_context(closing(build_agent(tokenizer, engine)))


def check_search(config: Config, may_search: bool) -> None:
    """Raise ValueError if questions need a search server and none answers.

    Args:
        config: the settings.
        may_search: whether there are questions that may search.
    """
    if config.do_search and may_search:
        hook("check_search")(config)


class PlannedBenchmark(NamedTuple):
    """One benchmark that a model is going to be asked.

    Attributes:
        file: the file of its rows.
        retriever: what its searches find.
        label: its name in reports.
        folder: the folder of its results.
        settings: everything on which its results depend.
    """

    file: Path
    retriever: str
    label: str
    folder: Path
    settings: dict[str, Any]


@dataclass(frozen=True)
class EvaluationTarget:
    """One model that is going to be measured, and with which settings.

    Attributes:
        folder: the model's folder; None for a model on a server.
        name: the model's place below --out.
        config: the settings.
    """

    folder: Path | None
    name: Path
    config: Config

    def benchmarks(self, options: argparse.Namespace) -> Iterator[PlannedBenchmark]:
        """Yield what the model is asked: each file, once for each retriever."""
        for path in options.benchmarks:
            settings = {
                "model": str(self.folder or options.model),
                "file": hashlib.sha256(path.read_bytes()).hexdigest(),
                **{name: getattr(options, name) for name in RESULT_OPTIONS},
                **{
                    key: value
                    for key, value in flatten(self.config).items()
                    if key.startswith(RESULT_SETTINGS)
                },
            }
            for retriever in options.retrievers:
                label = benchmark_label(path.stem, retriever)
                control = {} if retriever == OWN else {"retriever": retriever}
                folder = options.out / self.name / label
                yield PlannedBenchmark(path, retriever, label, folder, {**settings, **control})


def evaluation_targets(options: argparse.Namespace) -> Iterator[EvaluationTarget]:
    """Yield the models to measure, each looked at without loading torch.

    Settings, existing results, rows and servers are looked at; rows and servers once for each run.

    Raises ValueError for a mistake of the user.
    """
    check_writable(options.out)
    configs: dict[Path | None, Config] = {}  # by the folder of the run, or of the model
    folders: Iterable[Path | None] = [None] if options.base_url else folders_of(options)
    if not options.watch:
        folders = list(folders)
    for folder in folders:
        origin = folder if folder is None else run_folder(folder) or folder
        is_new = origin not in configs
        if is_new:
            configs[origin] = settings_of(folder, options)
            check_retrievers(configs[origin], options)
        target = EvaluationTarget(folder, relative_results_path(folder, options.model), configs[origin])
        for planned in target.benchmarks(options):
            check_results(planned.folder, planned.settings, options.resume)
        if is_new:
            check_rows(target, options)
            check_servers(target.config, options)
        yield target


def check_writable(folder: Path) -> None:
    """Raise ValueError if results can't be written into a folder."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(f"--out: found {folder}, which can't be written to; expected another folder")


def check_rows(target: EvaluationTarget, options: argparse.Namespace) -> None:
    """Look at the user's reward function, at the environments and at the rows, without a tokenizer.

    Rows of large files are looked at with the tokenizer alone, after the model is loaded.

    Raises ValueError if they can't be used, or if a file has fewer rows than -n asks for.
    """
    from verl.data.rl_dataset import RLHFDataset, read_rows, row_settings
    from verl.data.row_check import SMALL_BYTES, RowCheck
    from verl.data.row_environments import environments_in
    from verl.environments.registry import SEARCH, check_usable
    from verl.utils.reward_score import load_reward_function
    from verl.verifiers.registry import Verifiers
    from verl.verifiers.verifier import VerifierSettings

    config = target.config
    load_reward_function(config.custom_reward_function)
    for path in options.benchmarks:
        for env_class in sorted(environments_in(path, config.environment.env_class) - {SEARCH}):
            check_usable(env_class, config.environment.env_config.get(env_class, {}))
    verifiers = Verifiers(VerifierSettings(config.verifiers, options.out / target.name))
    try:
        for path in options.benchmarks:
            if options.n is not None:
                num_rows = sum(1 for _ in read_rows(str(path), lambda columns, where: None))
                if options.n > num_rows:
                    raise ValueError(
                        f"-n: found {options.n}, {path} has {num_rows} rows; expected at most that"
                    )
            if path.stat().st_size > SMALL_BYTES:
                continue
            dataset = RLHFDataset(str(path), None, row_settings(config), options.n)
            RowCheck.of(config, [dataset], None, None, verifiers).check()
    finally:
        verifiers.close()


def check_servers(config: Config, options: argparse.Namespace) -> None:
    """Raise ValueError if rows search, and no search server answers."""
    check_search(config, asks_search_server(environments_asked(config, options), options))


def environments_asked(config: Config, options: argparse.Namespace) -> set[str]:
    """Return the environments of the rows of all benchmarks."""
    from verl.data.row_environments import environments_in

    names = [environments_in(path, config.environment.env_class) for path in options.benchmarks]
    return set[str]().union(*names)


def asks_search_server(environments: set[str], options: argparse.Namespace) -> bool:
    """Return whether rows of these environments ask a search server with the --retriever of the command."""
    from verl.data.row_environments import SEARCHING

    asks_server = not set(options.retrievers).isdisjoint((OWN, SHUFFLED))
    return asks_server and not environments.isdisjoint(SEARCHING)


def print_servers(options: argparse.Namespace, corpus: Path | None = None) -> int:
    """Print which servers the command asks that have no address, as verl.preflight.servers does.

    Args:
        options: the command line.
        corpus: of `verl.synthesis`, the corpus on whose passages questions are written and searched.

    Returns:
        The exit status.
    """
    from verl.data.row_programs import ask_code_server, names_code_verifier
    from verl.preflight.servers import CODE, RETRIEVAL, retrieval_line

    model = Path(options.model).expanduser()
    try:
        settings = load_settings(model if model.is_dir() and options.base_url is None else None, options)
    except ValueError as error:
        print(f"error: {printable(error)}", file=sys.stderr)
        return 2
    config = settings.loaded.config
    environments = environments_asked(config, options)
    searches = config.do_search and (corpus is not None or asks_search_server(environments, options))
    if searches and not settings.names_search_server and not os.environ.get("RETRIEVER_URL"):
        print(retrieval_line(options.benchmarks) if corpus is None else f"{RETRIEVAL} {corpus}")
    has_code_url = config.verifiers.code.api_url or os.environ.get("CODE_API_URL")
    if not has_code_url:
        names_code = any(names_code_verifier(path) for path in options.benchmarks)
        if names_code or ask_code_server(environments, config):
            print(CODE)
    return 0


def evaluate(
    target: EvaluationTarget,
    options: argparse.Namespace,
    use: Callable[[Benchmark, Any, str], None] | None,
) -> None:
    """Measure one model on all benchmarks.

    Args:
        target: the model, looked at.
        options: the command line.
        use: is called with each benchmark after its rollouts, with the tokenizer and with the model's name.

    Raises:
        ValueError: for a mistake of the user.
        EngineUnavailable: if the engine can't be used.
        RunStopped: if the evaluation can't go on.
    """
    with announce("loading the libraries", sys.stderr), gc_paused():
        from verl.data.controls import with_retriever
        from verl.data.rl_dataset import RLHFDataset, row_settings
        from verl.data.row_check import RowCheck
        from verl.evaluation.rollouts import Benchmark, EvaluationSettings, format_figure
        from verl.trainer.ppo.scoring import RewardManager
        from verl.utils.reward_score import load_reward_function
        from verl.verifiers.registry import Verifiers
        from verl.verifiers.verifier import VerifierSettings

    config = target.config
    name = target.name
    evaluation_settings = EvaluationSettings(
        options.rollouts,
        options.temperature,
        options.seed,
        options.concurrency,
        options.solved_at,
        options.prices,
        options.category,
        options.similarity or options.encoder is not None,
    )
    encode = None
    if options.encoder is not None:
        encode = hook("text_encoder")(options.encoder)
    with announce(f"loading {name}", sys.stderr), ExitStack() as stack:
        agent = stack.enter_context(agent_of(target.folder, config, options))
        open_agent = stack.pop_all()
    with open_agent:
        data = row_settings(config)
        row_tokenizer = agent.tokenizer
        if not hasattr(agent.tokenizer, "vocab_size"):  # tokens are messages here: the server limits lengths
            data["truncation"] = "left"
            row_tokenizer = None
        vocab_size = agent.engine.vocab_size if target.folder is not None else None
        verifiers = Verifiers(VerifierSettings(config.verifiers, options.out / name))
        open_agent.callback(verifiers.close)
        score = load_reward_function(config.custom_reward_function)
        reward_fn = RewardManager(agent.tokenizer, 0, score, verifiers, stops=False)
        datasets: dict[Path, RLHFDataset] = {}
        for path in options.benchmarks:
            datasets[path] = RLHFDataset(str(path), agent.tokenizer, data, options.n)
            RowCheck.of(config, [datasets[path]], row_tokenizer, vocab_size, verifiers).check()
        benchmarks: list[Benchmark] = []
        for planned in target.benchmarks(options):
            dataset = datasets[planned.file]
            rows = with_retriever(dataset, planned.retriever, options.seed, config.max_turns)
            benchmarks.append(Benchmark(planned.label, rows, planned.folder, planned.settings, encode))
        summaries: dict[str, dict[str, Any]] = {}
        for benchmark in benchmarks:
            summary = benchmark.run(agent, reward_fn, evaluation_settings)
            summaries[benchmark.name] = summary
            figures = {key: value for key, value in summary.items() if isinstance(value, list)}
            report = ", ".join(f"{key} {format_figure(value)}" for key, value in figures.items())
            print(f"{name} on {benchmark.name}: {report}; {benchmark.folder}/page.html", flush=True)
            if use is not None:
                use(benchmark, agent.tokenizer, str(name))
        if len(options.retrievers) > 1:
            for path in options.benchmarks:
                print(f"{name} on {path.stem}\n{beside_each_other(path.stem, options.retrievers, summaries)}")


def beside_each_other(
    benchmark: str, retrievers: Sequence[str], summaries: Mapping[str, Mapping[str, Any]]
) -> str:
    """Return the figures of a benchmark as a table: a line for each figure, a column for each retriever."""
    from verl.evaluation.rollouts import format_figure

    columns = [summaries[benchmark_label(benchmark, retriever)] for retriever in retrievers]
    names = [name for name, value in columns[0].items() if isinstance(value, list) or name == "searches"]
    cells = [["", *retrievers]]
    for name in names:
        cells.append([name, *[format_figure(column.get(name)) for column in columns]])
    widths = [max(len(row[number]) for row in cells) for number in range(len(cells[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    return "\n".join(line.rstrip() for line in lines)


def benchmark_label(benchmark: str, retriever: str) -> str:
    """Return the name of a benchmark, which says whether its searches find other passages than their own."""
    return benchmark if retriever == OWN else f"{benchmark}/{retriever}"


def check_retrievers(config: Config, options: argparse.Namespace) -> None:
    """Raise ValueError if --retriever changes what searches find where nothing is searched."""
    from verl.data.row_environments import check_controlled, environments_in

    for retriever in options.retrievers:
        if retriever != OWN and not config.do_search:
            raise ValueError(
                f"Found --retriever {retriever} with do_search=false, where nothing is searched; expected "
                f"do_search=true, or --retriever {OWN}."
            )
        for path in options.benchmarks:
            environments = environments_in(path, config.environment.env_class)
            check_controlled(retriever, environments, f"the rows of {path} (--retriever)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; see `run_command`."""
    parser = build_parser("python -m verl.evaluation", __doc__, "evals")
    parser.add_argument(
        "--retriever",
        default=OWN,
        help="what searches find: own, shuffled (passages of other questions), empty, or several: a,b (own)",
    )
    options = read_options(parser, argv)
    if not options.benchmarks:
        parser.error("--benchmarks: found none, expected files of rows or names")
    if options.servers:
        return print_servers(options)
    return run_command(options)


def run_command(options: argparse.Namespace, use: Callable[[Benchmark, Any, str], None] | None = None) -> int:
    """Evaluate the models; return the exit status.

    The status is 0; 2 for a mistake of the user; 3 if the command ended before its time, and --resume goes
    on; and 130 for a Ctrl-C.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    stopped: tuple[type[Exception], ...] = ()
    disk_errors: tuple[int, ...] = ()
    try:
        models: Iterable[EvaluationTarget] = evaluation_targets(options)
        if not options.watch:
            models = list(models)  # all are looked at before one is loaded
        for target in models:
            with announce("loading the libraries", sys.stderr), gc_paused():
                from verl.checkpoints.run_state import DISK_ERRORS, RunStopped
                from verl.sessions.engine_contract import EngineUnavailable

            stopped = (RunStopped, EngineUnavailable)
            disk_errors = DISK_ERRORS
            evaluate(target, options, use)
    except ValueError as error:
        print(f"error: {printable(error)}", file=sys.stderr)
        return 2
    except stopped as error:
        print(f"error: {printable(error)}. The same command with --resume goes on.", file=sys.stderr)
        return 3
    except OSError as error:
        if error.errno not in disk_errors:
            raise
        path = printable(error.filename or options.out)
        problem = f"{path} can't be written: {error.strerror}"
        print(f"error: {problem}. Make room; the same command with --resume goes on.", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0
