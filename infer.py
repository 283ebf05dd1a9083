"""Ask a trained model. It thinks, searches and answers, and you see everything while it happens.

    python infer.py                                    the newest checkpoint of a local run; type questions
    python infer.py --question "Who directed Amber Harbor?"
    python infer.py --input questions.txt --json > answers.jsonl          one question a line
    python infer.py --model Qwen/Qwen2.5-3B-Instruct --retriever-url http://127.0.0.1:8000/retrieve

    question -> prompt template -> LLMGenerationManager (the loop of training) -> text, documents, answer

Lengths, max_turns and topk are those of the run that made the model. They are read from the config.yaml of
its run folder, or from the one beside the model, which `scripts/convert_checkpoint.py to-hf` writes. A line
on stderr says which file it was. The prompt template is --template, else prompt_template.txt beside the
model, else the general search prompt.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import verl  # noqa: F401  # isort: skip  (first, as it says which Python has a missing package)
from rich.console import Console
from rich.text import Text

from verl.monitor.runs import state_of
from verl.utils.announcing import announce, gc_paused
from verl.utils.logs import start_logging
from verl.utils.model_folders import LOCAL_SEARCH, find_model, run_folder, search_address
from verl.utils.text import printable

if TYPE_CHECKING:
    from search_r1.llm_agent.generation import LLMGenerationManager
    from verl.agent.loop import LoopEvent

TAG = re.compile(r"</?(?:think|search|information|answer)>")
STYLES = {"think": "bright_black", "search": "cyan", "information": "bright_black", "answer": "bold green"}
DOCUMENT_CHARS = 160  # the characters shown of each document

# What a run fixes about its trajectories. Lengths are in tokens. These values are Search-R1's.
DEFAULT_SETTINGS = {"max_turns": 4, "topk": 3, "max_start_length": 2048, "max_prompt_length": 4096}
DEFAULT_SETTINGS |= {"max_response_length": 500, "max_obs_length": 500}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Ask a model that searches. Without --question it asks you.")
    add = parser.add_argument
    add("--question", help="one question; without it, questions are read until the input ends")
    add("--input", type=Path, help="file with one question a line; -: read them from the input")
    add("--json", action="store_true", help="print one JSON object for each question, and nothing else")
    add("--model", help="Hugging Face folder, checkpoint or run folder, or hub name")
    default = f"RETRIEVER_URL, else that of the model's run while it trains, else {LOCAL_SEARCH}"
    add("--retriever-url", help=f"search server, or several: a,b (default: {default})")
    add("--use-proxy", action="store_true", help="reach it through the proxies that the environment names")
    add("--topk", type=int, help="documents per search (default: the run's, else 3)")
    add("--max-turns", type=int, help="most searches per question (default: the run's, else 4)")
    add("--template", type=Path, help="file with the prompt; {question} stands for the question")
    add("--temperature", type=float, default=0.0, help="0 (default): always the most likely token")
    add("--seed", type=int, default=0, help="of the sampling, with --temperature above 0")
    add("--device", help="cuda, cpu, ... (default: cuda if there is one)")
    add("--dtype", choices=["float32", "bfloat16"], help="default: bfloat16 on cuda, else float32")
    return parser


# ---- what to run, checked before anything large is loaded ----


def find_template(path: Path | None, model: str) -> str:
    """Return the text of the prompt template.

    Raises ValueError if the template can't be read or has no place for the question.
    """
    from data_prep.prompts import SEARCH_PROMPT, read_template

    stored = Path(model) / "prompt_template.txt"
    return SEARCH_PROMPT if path is None and not stored.is_file() else read_template(path or stored)


def read_run_config(file: Path) -> dict[str, Any]:
    """Return the configuration that a run wrote. Raises ValueError if the file holds none."""
    import yaml

    try:
        config = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        problem = " ".join(str(error).split())  # the parser's message has several lines
        raise ValueError(f"{file} can't be read: {problem}; expected the config.yaml of a run") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file} holds {config!r:.50}; expected the config.yaml of a run, with its settings")
    return config


def find_settings(model: str, max_turns: int | None, topk: int | None) -> tuple[dict[str, int], str]:
    """Return the settings of DEFAULT_SETTINGS, and a line that says where they come from.

    A flag wins over the run, and the run over the default. Raises ValueError for a flag that is too small.
    """
    flags = {name: value for name, value in (("max_turns", max_turns), ("topk", topk)) if value is not None}
    for name, value in flags.items():
        minimum = 0 if name == "max_turns" else 1
        if value < minimum:
            raise ValueError(f"--{name.replace('_', '-')}: found {value}, expected {minimum} or more")
    run_settings: dict[str, int] = {}
    origin = "defaults and flags, as no config.yaml of a run was found with this model"
    for folder in (run_folder(Path(model)), Path(model)):
        if run_settings or folder is None or not (folder / "config.yaml").is_file():
            continue
        config = read_run_config(folder / "config.yaml")
        blocks = {"max_turns": config, "topk": config.get("retriever", {})}
        values = {name: blocks.get(name, config.get("data", {})).get(name) for name in DEFAULT_SETTINGS}
        run_settings = {name: value for name, value in values.items() if value is not None}
        # The configuration of a supervised run has none of these settings.
        origin = f"from {folder}/config.yaml" if run_settings else origin
    settings = DEFAULT_SETTINGS | run_settings | flags
    differing = [name for name, value in settings.items() if run_settings.get(name) != value]
    if run_settings and differing:
        origin += f", but for {' and '.join(differing)}"
    return settings, f"settings: {' '.join(f'{name}={value}' for name, value in settings.items())} ({origin})"


def find_search_server(model: str) -> str:
    """Return the address of the search server, where the command line names none."""
    run = run_folder(Path(model))
    if run is None or not (run / "config.yaml").is_file():
        return search_address(None, False)[0]
    retriever = read_run_config(run / "config.yaml").get("retriever") or {}
    return search_address(retriever.get("url"), state_of(run) == "running")[0]


def check_retriever(url: str, topk: int, use_proxy: bool) -> None:
    """Raise ValueError if the search server does not answer."""
    from search_r1.search.client import SearchClient, SearchError

    with SearchClient(url, topk=topk, timeout=5.0, use_proxy=use_proxy) as client:
        try:
            client.batch_search(["is anybody there"])
        except SearchError as error:
            raise ValueError(
                f"the search server does not answer: {error}. {how_to_start(client.urls)}, or say where it "
                "is with --retriever-url"
            ) from None


def how_to_start(urls: Sequence[str]) -> str:
    """Return the advice for servers that don't answer."""
    hosts = dict.fromkeys(urlsplit(url).hostname or "" for url in urls)
    is_local = any(host in ("localhost", "127.0.0.1", "::1", "0.0.0.0") for host in hosts)
    return "Start one with `bash retrieval_launch.sh`" + ("" if is_local else f" on {' or '.join(hosts)}")


def normalize(question: str) -> str:
    """Return a question as data preparation writes it: stripped, with a question mark at its end.

    Raises ValueError if the question is empty.
    """
    question = question.strip()
    if not question:
        raise ValueError('the question is empty: write one, such as --question "Who wrote Hamlet?"')
    return question if question.endswith("?") else question + "?"


def read_questions(console: Console) -> Iterator[str]:
    """Yield the questions that are typed or piped in, until the input ends.

    Blank lines are skipped. At a terminal a blank line ends the input.
    """
    is_interactive = sys.stdin.isatty()
    if is_interactive:
        console.print("Type a question; an empty line or Ctrl-D ends.", style="dim")
    while True:
        try:
            line = input("\n? " if is_interactive else "")
        except EOFError:
            return
        if line.strip():
            yield normalize(line)
        elif is_interactive:
            return


# ---- asking ----


class Screen:
    """A console that shows the events of a trajectory as they come, each kind of text in its colour."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._pending = ""  # text held back because it may be the start of a tag
        self._style = ""

    def show(self, event: LoopEvent) -> None:
        if event.kind == "text":
            self._write(event.text)
            return
        self._write("", final=True)
        self._style = ""
        if event.kind == "observation" and (documents := event.details["documents"]) is not None:
            self.console.print()
            if not documents:
                self.console.print("  nothing found", style="yellow")
            for number, document in enumerate(documents, start=1):
                title, _, text = printable(document["contents"]).partition("\n")
                text = " ".join(text.split())
                text = text if len(text) <= DOCUMENT_CHARS else text[:DOCUMENT_CHARS] + " ..."
                score = "" if document["score"] is None else f"  {document['score']:.2f}"
                line = Text.assemble((f"  Doc {number} ", "magenta"), (title, "bold"), (score, "dim"))
                self.console.print(line.append(f"\n        {text}", style="dim"))
        elif event.kind == "observation":
            self.console.print(Text("\n  [no action: the model is told so and goes on]", style="yellow"))

    def _write(self, text: str, final: bool = False) -> None:
        text = self._pending + text
        self._pending = ""
        start = text.rfind("<")
        if not final and start >= 0 and ">" not in text[start:] and len(text) - start < len("</information>"):
            self._pending = text[start:]
            text = text[:start]
        position = 0
        for tag in TAG.finditer(text):
            self._print(text[position : tag.start()])
            self._style = STYLES[tag[0].strip("</>")]
            self._print(tag[0])
            if tag[0].startswith("</"):
                self._style = ""
            position = tag.end()
        self._print(text[position:])

    def _print(self, text: str) -> None:
        if text:
            self.console.print(Text(printable(text), style=self._style), end="", soft_wrap=True)


def load_manager(
    model: str, settings: dict[str, int], arguments: argparse.Namespace, console: Console
) -> LLMGenerationManager:
    """Load a model and return the loop of training over it.

    Raises ValueError for a model that can't be loaded or run.
    """
    with gc_paused():
        import torch
        import transformers

        from search_r1.llm_agent.generation import GenerationConfig, LLMGenerationManager
        from search_r1.search.client import SearchClient
        from verl.agent.trajectory import generation_eos_ids
        from verl.utils import check_token_ids
        from verl.utils.hub import use_cache_if_hub_is_away
        from verl.workers.engine.loading import load_hf_config
        from verl.workers.rollout.native import NativeEngine

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype_name = arguments.dtype or ("bfloat16" if device.startswith("cuda") else "float32")
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype_name]
    use_cache_if_hub_is_away({"--model": model})
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        config = load_hf_config({"path": model})
        check_token_ids(tokenizer, config.get_text_config().vocab_size, model)
        max_positions = getattr(config.get_text_config(), "max_position_embeddings", None)
        engine = NativeEngine(
            config, 1, min(settings["max_prompt_length"], max_positions or sys.maxsize), dtype, device
        )
        with announce(f"loading {model}", file=sys.stderr):
            network: Any
            network, report = transformers.AutoModelForCausalLM.from_pretrained(
                model, config=config, dtype=dtype, output_loading_info=True
            )
            if missing := sorted(report["missing_keys"]):
                raise ValueError(f"its files lack {len(missing)} of its tensors, the first: {missing[0]}")
            network.to(device)
    except Exception as error:  # a broken folder raises errors of any kind: OSError, SafetensorError, ...
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"--model: {model} can't be loaded: {reason}") from error
    engine.load_weights(network.state_dict().items(), version=0)
    client = SearchClient(arguments.retriever_url, settings["topk"], use_proxy=arguments.use_proxy)
    generation = GenerationConfig(**settings, eos_token_ids=generation_eos_ids(model))
    return LLMGenerationManager(tokenizer, engine, client, generation, on_event=Screen(console).show)


def ask(
    manager: LLMGenerationManager,
    template: str,
    question: str,
    arguments: argparse.Namespace,
    console: Console,
) -> bool:
    """Ask one question and show how the model answers it. With --json, print the result instead.

    Returns:
        False if the search failed, else True.
    """
    import torch

    from data_prep.prompts import fill_prompt
    from search_r1.llm_agent.generation import parse_action
    from verl.data.rl_dataset import encode_prompt, prompt_text
    from verl.protocol import DataProto, object_array

    prompt = [{"role": "user", "content": fill_prompt(template, question)}]
    ids = encode_prompt(manager.tokenizer, prompt_text(manager.tokenizer, prompt))
    batch = DataProto.from_dict(
        tensors={"sampling_seeds": torch.tensor([arguments.seed])},
        non_tensors={"raw_prompt_ids": object_array([ids])},
        meta_info={"do_sample": arguments.temperature > 0, "temperature": arguments.temperature},
    )
    record = manager.run_llm_loop(batch).non_tensor_batch["trajectory"][0]
    reason = record["finish_reason"]
    answer = parse_action(record["turns"][-1]["text"])[1] if reason == "answer" else None
    if arguments.json:
        result = {"question": question, "answer": answer, "finish_reason": reason}
        result |= {"num_searches": record["num_searches"], "turns": record["turns"]}
        print(json.dumps(result, ensure_ascii=False, default=str), flush=True)
        return reason != "search_failed"
    console.print()
    if reason == "search_failed":
        print(f"error: the search failed: {printable(record['turns'][-1]['error'])}", file=sys.stderr)
        return False
    if answer is not None:
        console.print(Text.assemble(("\nAnswer: ", "bold"), (printable(answer), "bold green")))
    else:
        console.print(f"\nNo answer: the model ended with {reason!r}.", style="yellow")
    console.print(f"({record['num_searches']} searches)", style="dim")
    return True


def run(arguments: argparse.Namespace) -> int:
    """Check the arguments, load the model and ask the questions.

    Returns:
        The exit status: 1 if a search failed, else 0. Questions that are typed at a terminal always give 0.

    Raises:
        ValueError: For a mistake of the user.
    """
    if arguments.question is not None and arguments.input is not None:
        raise ValueError("--question and --input: give one of them")
    console = Console(highlight=False, quiet=arguments.json)
    questions: Iterator[str] = read_questions(console)
    if arguments.question is not None:
        questions = iter([normalize(arguments.question)])
    elif arguments.input is not None and str(arguments.input) != "-":
        try:
            lines = arguments.input.read_text(encoding="utf-8-sig").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--input: {arguments.input} can't be read ({error})") from None
        questions = iter([normalize(line) for line in lines if line.strip()])
    if arguments.temperature < 0:
        raise ValueError(f"--temperature: found {arguments.temperature}, expected 0 or more")
    model = find_model(arguments.model)
    if arguments.model is None:
        taken = f"note: asks {model}, the newest model of all runs here; --model takes another"
        print(printable(taken), file=sys.stderr)
    if arguments.retriever_url is None:
        arguments.retriever_url = find_search_server(model)
    template = find_template(arguments.template, model)
    settings, settings_line = find_settings(model, arguments.max_turns, arguments.topk)
    check_retriever(arguments.retriever_url, settings["topk"], arguments.use_proxy)
    console.print(Text(f"model {model}   search {arguments.retriever_url}", style="dim"))
    typed = arguments.question is None and arguments.input is None and sys.stdin.isatty()
    went_well = []
    with closing(load_manager(model, settings, arguments, console)) as manager:
        print(settings_line, file=sys.stderr)
        for question in questions:
            if not typed and arguments.question is None:
                console.print(Text(printable(f"\n? {question}"), style="bold"))
            went_well.append(ask(manager, template, question, arguments, console))
    if not typed and not went_well:
        raise ValueError("no question: give one with --question, or one a line with --input or on the input")
    return 0 if typed or all(went_well) else 1


def main() -> int:
    """Run the program and return its exit status.

    Returns:
        0 for success, 1 when a search failed, 2 for a mistake of the user, 130 after Ctrl-C.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    arguments = build_parser().parse_args()
    try:
        return run(arguments)
    except ValueError as error:
        print(f"error: {printable(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    start_logging("infer")
    sys.exit(main())
