"""Ask a trained model: it thinks, searches and answers, and everything is shown while it happens.

    python infer.py                                    the newest checkpoint of a local run; type questions
    python infer.py --question "Who directed Amber Harbor?"
    python infer.py --input questions.txt --json > answers.jsonl          one question a line
    python infer.py --model Qwen/Qwen2.5-3B-Instruct --retriever-url http://127.0.0.1:8000/retrieve

    question -> prompt template -> LLMGenerationManager (the loop of training) -> text, documents, answer

Lengths, max_turns and topk are those of the run that made the model, by the config.yaml of its run folder, or
the one beside the model (`scripts/convert_checkpoint.py to-hf` writes it); a line on stderr says which. The
prompt template is --template, else prompt_template.txt beside the model, else the general search prompt.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

try:
    from rich.console import Console
    from rich.text import Text
except ModuleNotFoundError as missing:
    sys.exit(
        f"error: {sys.executable} has no {missing.name}. Use the environment that the training scripts made "
        "(.venv/bin/python infer.py ...), or install: pip install -c constraints.txt -e '.[train]'"
    )

CHECKPOINT_ROOTS = ("verl_checkpoints", "checkpoints")
TEMPLATE_FILE = "prompt_template.txt"
CONFIG_FILE = "config.yaml"
TAG = re.compile(r"</?(?:think|search|information|answer)>")
STYLES = {"think": "bright_black", "search": "cyan", "information": "bright_black", "answer": "bold green"}
DOCUMENT_CHARS = 160  # of each document shown


@dataclass
class Settings:
    """What a run fixed about its trajectories (lengths in tokens); Search-R1's values without one."""

    max_turns: int = 4
    topk: int = 3
    max_start_length: int = 2048
    max_prompt_length: int = 4096
    max_response_length: int = 500
    max_obs_length: int = 500


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Ask a model that searches. Without --question it asks you.")
    add = parser.add_argument
    add("--question", help="one question; without it, questions are read until the input ends")
    add("--input", type=Path, help="file with one question a line; -: read them from the input")
    add("--json", action="store_true", help="print one JSON object for each question, and nothing else")
    add("--model", help="Hugging Face folder, checkpoint or run folder, or hub name")
    url = os.environ.get("RETRIEVER_URL", "http://127.0.0.1:8000/retrieve")
    add("--retriever-url", default=url, help=f"search server, or several: a,b (RETRIEVER_URL: {url})")
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


def run_folder(model: str | Path) -> Path | None:
    """RUN, if the model is RUN/global_step_N/actor/huggingface of a finished checkpoint."""
    parents = Path(model).resolve().parents
    is_checkpoint = len(parents) > 2 and re.fullmatch(r"global_step_\d+", parents[1].name)
    return parents[2] if is_checkpoint else None


def newest_checkpoint(roots: Sequence[Path]) -> Path | None:
    """The Hugging Face folder below `roots` that was written last."""
    configs = [path for root in roots for path in root.glob("**/huggingface/config.json")]
    configs = [path for path in configs if run_folder(path.parent) and path.parents[1].name == "actor"]
    return max(configs, key=lambda path: path.stat().st_mtime).parent if configs else None


def find_model(model: str | None) -> str:
    """A folder with config.json, or a hub name. Raises ValueError that says what to give."""
    if model is None:
        newest = newest_checkpoint([Path(root) for root in CHECKPOINT_ROOTS])
        if newest is None:
            raise ValueError(
                f"no trained model below {' or '.join(CHECKPOINT_ROOTS)}: make one with "
                "`bash train_grpo.sh`, or give one with --model"
            )
        return str(newest)
    folder = Path(model).expanduser()
    if (folder / "config.json").is_file():
        return str(folder)
    if (folder / "adapter_config.json").is_file():
        raise ValueError(
            f"--model: {folder} holds a LoRA adapter, not a model; give the folder huggingface beside it: "
            "the model with the adapter merged in"
        )
    if folder.is_dir():
        newest = newest_checkpoint([folder])
        if newest is None:
            raise ValueError(f"--model: {folder} holds no config.json and no global_step_N/actor/huggingface")
        return str(newest)
    is_hub_name = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", model) and not Path(folder.parts[0]).exists()
    if not is_hub_name:
        raise ValueError(f"--model: there is no folder {model}, and it is no hub name (organisation/model)")
    return model


def find_template(path: Path | None, model: str) -> str:
    """The prompt template's text. Raises ValueError if it can't be read or has no place for the question."""
    from data_prep.prompts import SEARCH_PROMPT, read_template

    beside = Path(model) / TEMPLATE_FILE
    if path is None and not beside.is_file():
        return SEARCH_PROMPT
    return read_template(path or beside)


def read_config(model: str) -> tuple[Path | None, dict[str, int]]:
    """(config.yaml of the run that made the model, or None; what it says of `Settings`)."""
    run = run_folder(model)
    for folder in (run, Path(model)):
        if folder is None or not (folder / CONFIG_FILE).is_file():
            continue
        import yaml

        config = yaml.safe_load((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        blocks = {"max_turns": config, "topk": config.get("retriever", {})}
        values = {name: blocks.get(name, config.get("data", {})).get(name) for name in vars(Settings())}
        known = {name: value for name, value in values.items() if value is not None}
        if known:  # not the one of a supervised run, or of something else
            return folder / CONFIG_FILE, known
    return None, {}


def told_settings(model: str, settings: Settings) -> str:
    """A line on the settings that are used, and where they are from."""
    path, known = read_config(model)
    shown = [f"{name}={value}" for name, value in vars(settings).items()]
    others = [name for name, value in vars(settings).items() if known.get(name) != value]
    origin = f"from {path}" + (f", but for {' and '.join(others)}" if others else "")
    if path is None:
        origin = f"defaults and flags, as no {CONFIG_FILE} of a run was found with this model"
    return f"settings: {' '.join(shown)} ({origin})"


def find_settings(model: str, max_turns: int | None, topk: int | None) -> Settings:
    """The run's settings where they are known, and what the flags say instead."""
    settings = Settings(**read_config(model)[1])
    if max_turns is not None:
        if max_turns < 0:
            raise ValueError(f"--max-turns: found {max_turns}, expected 0 or more")
        settings.max_turns = max_turns
    if topk is not None:
        if topk < 1:
            raise ValueError(f"--topk: found {topk}, expected 1 or more")
        settings.topk = topk
    return settings


def check_retriever(url: str, topk: int, use_proxy: bool) -> None:
    """Raises ValueError if the search server does not answer."""
    from search_r1.search.client import SearchClient, SearchError

    with SearchClient(url, topk=topk, timeout=5.0, use_proxy=use_proxy) as client:
        try:
            client.batch_search(["is anybody there"])
        except SearchError as error:
            raise ValueError(
                f"the search server does not answer: {error}. {_how_to_start(url)}, or say where it is with "
                "--retriever-url"
            ) from None


def _how_to_start(url: str) -> str:
    """What to do about servers that don't answer; `url`: those of this machine are started here."""
    from search_r1.search.client import parse_urls
    from search_r1.search.probe import is_own, resolve

    hosts = dict.fromkeys(urlsplit(each).hostname or "" for each in parse_urls(url))
    others = [host for host in hosts if not any(map(is_own, resolve(host)))]
    if len(others) < len(hosts):
        return "Start one with `bash retrieval_launch.sh`"
    unknown = [host for host in others if not resolve(host)]
    if unknown == others:
        return f"Look whether {' and '.join(others)} is the right name"
    return f"Start one with `bash retrieval_launch.sh` on {' or '.join(others)}"


# ---- the screen ----


@dataclass
class Screen:
    """Prints the events of a trajectory as they come, each kind of text in its colour."""

    console: Console
    pending: str = ""  # text held back because it may be the start of a tag
    style: str = ""

    def show(self, event: Any) -> None:
        """`event`: search_r1.llm_agent.loop.Event."""
        if event.kind == "text":
            self._write(event.text)
            return
        self._write("", final=True)
        self.style = ""
        if event.kind == "observation":
            self.console.print()
            if not event.documents:
                self.console.print("  nothing found", style="yellow")
            for number, document in enumerate(event.documents, start=1):
                self._document(number, document)
        elif event.kind == "hint":
            self.console.print(Text("\n  [no action: the model is told so and goes on]", style="yellow"))

    def _document(self, number: int, document: Any) -> None:
        title, _, text = document["contents"].partition("\n")
        text = " ".join(text.split())
        short = text if len(text) <= DOCUMENT_CHARS else text[:DOCUMENT_CHARS] + " ..."
        score = "" if document["score"] is None else f"  {document['score']:.2f}"
        self.console.print(Text.assemble((f"  Doc {number} ", "magenta"), (title, "bold"), (score, "dim")))
        self.console.print(Text(f"        {short}", style="dim"))

    def _write(self, text: str, final: bool = False) -> None:
        text, self.pending = self.pending + text, ""
        start = text.rfind("<")
        if not final and start >= 0 and ">" not in text[start:] and len(text) - start < len("</information>"):
            text, self.pending = text[:start], text[start:]
        place = 0
        for tag in TAG.finditer(text):
            name = tag[0].strip("</>")
            self._print(text[place : tag.start()])
            self.style = STYLES[name]
            self._print(tag[0])
            if tag[0].startswith("</"):
                self.style = ""
            place = tag.end()
        self._print(text[place:])

    def _print(self, text: str) -> None:
        if text:
            self.console.print(Text(text, style=self.style), end="", soft_wrap=True)


# ---- asking ----


@dataclass
class Asker:
    """A loaded model and its search client: `ask` runs one question through the loop of training."""

    model: str
    template: str
    settings: Settings
    arguments: argparse.Namespace
    console: Console
    manager: Any = field(init=False)
    tokenizer: Any = field(init=False)

    def __post_init__(self) -> None:
        """Loads tokenizer and weights. Raises ValueError for a model that can't be loaded or run."""
        import torch
        import transformers

        from search_r1.llm_agent.generation import GenerationConfig, LLMGenerationManager
        from search_r1.search.client import SearchClient
        from verl.workers.rollout.native import NativeEngine

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        device = self.arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
        name = self.arguments.dtype or ("bfloat16" if device.startswith("cuda") else "float32")
        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
        try:
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(self.model)
            config = transformers.AutoConfig.from_pretrained(self.model)
            bound = getattr(config.get_text_config(), "max_position_embeddings", None)
            longest = min(self.settings.max_prompt_length, bound or sys.maxsize)
            engine = NativeEngine(config, 1, longest, dtype, device)
            model: Any = transformers.AutoModelForCausalLM.from_pretrained(self.model, dtype=dtype)
            model.to(device)
        except (
            Exception
        ) as error:  # a broken folder raises all kinds: OSError, SafetensorError, ImportError, ...
            raise ValueError(f"--model: {self.model} can't be loaded: {first_line(error)}") from error
        engine.load_weights(model.state_dict().items(), version=0)
        generation = GenerationConfig(**vars(self.settings))
        url, use_proxy = self.arguments.retriever_url, self.arguments.use_proxy
        client = SearchClient(url, topk=self.settings.topk, use_proxy=use_proxy)
        screen = Screen(self.console)
        self.manager = LLMGenerationManager(self.tokenizer, engine, client, generation, on_event=screen.show)

    def close(self) -> None:
        """Ends the search client."""
        self.manager.close()

    def ask(self, question: str) -> bool:
        """Shows how the model answers, or prints it with --json; False if its search failed."""
        import torch

        from data_prep.prompts import fill_prompt
        from search_r1.llm_agent.codec import parse_action
        from verl.protocol import DataProto, object_array
        from verl.utils.dataset.rl_dataset import prompt_text

        content = fill_prompt(self.template, question)
        text = prompt_text(self.tokenizer, [{"role": "user", "content": content}])
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        batch = DataProto.from_dict(
            tensors={"sampling_seeds": torch.tensor([self.arguments.seed])},
            non_tensors={"raw_prompt_ids": object_array([ids])},
            meta_info={
                "do_sample": self.arguments.temperature > 0,
                "temperature": self.arguments.temperature,
            },
        )
        record = self.manager.run_llm_loop(batch).non_tensor_batch["trajectory"][0]
        failed = record["finish_reason"] == "search_failed"
        answer = None
        if record["finish_reason"] == "answer":
            answer = parse_action(record["turns"][-1]["text"]).content
        if self.arguments.json:
            result = {
                "question": question,
                "answer": answer,
                "finish_reason": record["finish_reason"],
                "num_searches": record["num_searches"],
                "turns": record["turns"],
            }
            print(json.dumps(result, ensure_ascii=False, default=str), flush=True)
            return not failed
        self.console.print()
        if failed:
            print(f"error: the search failed: {record['turns'][-1]['error']}", file=sys.stderr)
            return False
        if answer is not None:
            self.console.print(Text.assemble(("\nAnswer: ", "bold"), (answer, "bold green")))
        else:
            ended = record["finish_reason"]
            self.console.print(f"\nNo answer: the model ended with {ended!r}.", style="yellow")
        self.console.print(f"({record['num_searches']} searches)", style="dim")
        return True


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def normalize(question: str) -> str:
    """A question as data preparation writes it: stripped, with a question mark. ValueError if it is empty."""
    question = question.strip()
    if not question:
        raise ValueError('the question is empty: write one, such as --question "Who wrote Hamlet?"')
    return question if question.endswith("?") else question + "?"


def read_questions(path: Path | None, console: Console) -> Iterator[str]:
    """Questions, normalized, until the end of the input; blank lines are passed over.

    `path`: a file of them; None or "-": what is typed or piped in. At a terminal an empty line ends too.
    """
    if path is not None and str(path) != "-":
        try:
            lines = path.read_text(encoding="utf-8-sig").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--input: {path} can't be read ({error})") from None
        yield from (normalize(line) for line in lines if line.strip())
        return
    interactive = sys.stdin.isatty()
    if interactive:
        console.print("Type a question; an empty line or Ctrl-D ends.", style="dim")
    while True:
        try:
            line = input("\n? " if interactive else "")
        except EOFError:
            return
        if line.strip():
            yield normalize(line)
        elif interactive:
            return


def run(arguments: argparse.Namespace) -> int:
    """Checks, loads, asks. Returns the exit status; raises ValueError for a user's mistake."""
    if arguments.question is not None and arguments.input is not None:
        raise ValueError("--question and --input: give one of them")
    console = Console(highlight=False, quiet=arguments.json)
    questions: Iterator[str] = read_questions(arguments.input, console)
    if arguments.question is not None:
        questions = iter([normalize(arguments.question)])
    elif arguments.input is not None and str(arguments.input) != "-":
        questions = iter(list(questions))  # read now: a file that can't be read is told before loading
    if arguments.temperature < 0:
        raise ValueError(f"--temperature: found {arguments.temperature}, expected 0 or more")
    model = find_model(arguments.model)
    template = find_template(arguments.template, model)
    settings = find_settings(model, arguments.max_turns, arguments.topk)
    check_retriever(arguments.retriever_url, settings.topk, arguments.use_proxy)
    console.print(Text(f"model {model}   search {arguments.retriever_url}", style="dim"))
    typed = arguments.question is None and arguments.input is None and sys.stdin.isatty()
    went_well = []
    with closing(Asker(model, template, settings, arguments, console)) as asker:
        print(told_settings(model, settings), file=sys.stderr)
        for question in questions:
            if not typed and arguments.question is None:
                console.print(Text(f"\n? {question}", style="bold"))
            went_well.append(asker.ask(question))
    if typed:
        return 0
    if not went_well:
        raise ValueError("no question: give one with --question, or one a line with --input or on the input")
    return 0 if all(went_well) else 1


def main() -> int:
    """Exit status: 0; 1 when a search failed; 2 for a mistake of the user; 130 by Ctrl-C."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    arguments = build_parser().parse_args()
    try:
        return run(arguments)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
