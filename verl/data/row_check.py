"""One look at all rows of a run before its first step, with the objects that the run itself uses.

    rows of all data sets -> chunks -> threads: read the cells, render, encode, score
        -> nothing, or ValueError that names file, row and column

A row is read by its data set (`RLHFDataset.read_row`), rendered and encoded by the tokenizer, and scored as
far as that takes no answer of a policy: its golden answers, the labels of its verifiers and the extras of its
environment are what the scorers can take. The tokenizer works outside of Python's lock, so that the threads
read and encode at the same time, beside the loading of the models.

A look without mistakes is remembered by a digest of all that it depends on (`RowCheck.key`), and the next run
on the same rows does not look again.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from contextlib import suppress
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from verl.config import Config
from verl.config.keys import as_list
from verl.config.mixture import sources_of
from verl.data.mixture import Mixture, training_rows
from verl.data.rl_dataset import (
    ReadRow,
    RLHFDataset,
    encode_prompt,
    opening_ids,
    prompt_text,
    row_settings,
)
from verl.data.row_cells import CellError, Row, reward_cell
from verl.environments.environment import BaseTextEnv, make_environment
from verl.environments.registry import SEARCH, load_class
from verl.utils import num_token_ids
from verl.utils.extras import MissingPackage
from verl.utils.json_files import to_json
from verl.utils.reward_score import with_golden_answers
from verl.utils.reward_score.qa_em import (
    check_answers,
    has_empty_answer,
    has_unusual_letters,
)
from verl.utils.text import short_repr
from verl.verifiers.registry import Verifiers, assigned_verifiers
from verl.verifiers.verifier import VerifierSettings

_CHUNK_ROWS = 512
SMALL_BYTES = 8 * 2**20  # files of this size are looked at before anything is loaded
_SHOWN = 10  # mistakes that a message names
_MOST_THREADS = 4  # more would wait for Python's lock
SCORED_BY_ANSWERS = (SEARCH, "single_turn")  # environments that leave the score to the reward function


class RowMistake(NamedTuple):
    """A row that can't be used.

    Attributes:
        place: the file, and the row or line.
        column: the name of the column.
        text: the cell, and the expected one.
    """

    place: str
    column: str
    text: str


class RowCheck:
    """The look at all rows of a run.

    `start` begins it in the background, `wait` waits for its end, and raises what is wrong.

    Args:
        datasets: the data sets of the run, as they are asked.
        tokenizer: the policy's tokenizer; None to read and score the cells alone.
        vocab_size: number of tokens that the model knows; None if that is not known.
        verifiers: the run's verifiers.
        needs_answers: whether the reward function compares with golden answers, as exact match does.
        env_config: the settings of each environment, by name.
        max_turns: the most turns of an episode.
        max_answer_tokens: the most tokens of a response; None if that is not known.
    """

    def __init__(
        self,
        datasets: Sequence[RLHFDataset],
        tokenizer: Any,
        vocab_size: int | None,
        verifiers: Verifiers,
        needs_answers: bool,
        env_config: Mapping[str, Any],
        max_turns: int,
        max_answer_tokens: int | None = None,
    ) -> None:
        self.datasets = datasets
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.verifiers = verifiers
        self.needs_answers = needs_answers
        self.env_config = env_config
        self.max_turns = max_turns
        self.max_answer_tokens = None if tokenizer is None else max_answer_tokens
        self.num_rows = 0  # rows that were looked at
        self.notes = dict[str, list[str]]()  # what is odd, but no mistake -> the places of the rows
        self._encode: Callable[[Sequence[str]], list[Any]] | None = None
        self._opening = [] if tokenizer is None else opening_ids(tokenizer)
        if tokenizer is not None and tokenizer.chat_template:
            self._opening = []
        self._sources = set[str]()  # files of the environments and verifiers of users
        self._verifier_lock = threading.Lock()
        self._pool = ThreadPoolExecutor(1, "row-check")
        self._ended: Future[None] | None = None

    @classmethod
    def of(
        cls,
        config: Config,
        datasets: Sequence[RLHFDataset],
        tokenizer: Any,
        vocab_size: int | None,
        verifiers: Verifiers,
    ) -> RowCheck:
        """Return the look at data sets of a run with this configuration."""
        needs_answers = config.custom_reward_function.path is None
        env_config = config.environment.env_config
        longest = config.data.max_response_length
        max_turns = config.max_turns
        return cls(datasets, tokenizer, vocab_size, verifiers, needs_answers, env_config, max_turns, longest)

    def start(self) -> RowCheck:
        """Begin to look in the background."""
        if self._ended is None:
            self._ended = self._pool.submit(self.check)
            self._pool.shutdown(wait=False)
        return self

    def wait(self, seconds: float | None = None) -> None:
        """Wait until all rows are looked at, or until `seconds` are over.

        Raises ValueError if rows can't be used. It names ten of them at most.
        """
        self.start()
        assert self._ended is not None
        ended, _ = wait_for_futures([self._ended], seconds)
        for future in ended:
            future.result()

    def check(self) -> None:
        """Look at all rows now, unless that is remembered. Raises ValueError if rows can't be used."""
        key = self.key()
        if key is not None and _is_remembered(key):
            return
        mistakes = list[RowMistake]()
        num_mistakes = 0
        num_threads = max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0))))
        with ThreadPoolExecutor(num_threads, "row-check") as pool:
            for chunk_mistakes in self._checked_chunks(pool, num_threads):
                num_mistakes += len(chunk_mistakes)
                mistakes += chunk_mistakes[: _SHOWN - len(mistakes)]
        if mistakes:
            lines = "".join(f"\n  {place}, column {column}: {text}" for place, column, text in mistakes)
            more = "" if num_mistakes <= _SHOWN else f"\n  and {num_mistakes - _SHOWN} more"
            raise ValueError(
                f"Found {num_mistakes} of {self.num_rows} rows that can't be asked and scored; correct them, "
                f"or take them out:{lines}{more}"
            )
        for text, places in self.notes.items():
            print(f"note: {len(places)} of {self.num_rows} rows have {text} (the first: {places[0]})")
        if key is not None:
            _remember(key, self._sources)

    def _checked_chunks(self, pool: ThreadPoolExecutor, num_threads: int) -> Iterator[list[RowMistake]]:
        """Yield the mistakes of each chunk of rows, in order. Few chunks are held at once."""
        pending = deque[Future[list[RowMistake]]]()
        for dataset, chunk in self._chunks():
            pending.append(pool.submit(self._check_chunk, dataset, chunk))
            if len(pending) > 2 * num_threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()

    def _chunks(self) -> Iterator[tuple[RLHFDataset, list[tuple[Any, Row]]]]:
        for dataset in self.datasets:
            rows = iter(dataset.rows_to_check())
            while chunk := list(islice(rows, _CHUNK_ROWS)):
                self.num_rows += len(chunk)
                yield dataset, chunk

    def _check_chunk(self, dataset: RLHFDataset, chunk: Sequence[tuple[Any, Row]]) -> list[RowMistake]:
        """Return what is wrong with some rows of a data set."""
        mistakes = dict[int, RowMistake]()

        def note(number: int, column: str, error: Exception) -> None:
            name = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            text = name + " ".join(str(error).split())[:300]
            mistakes[number] = RowMistake(dataset.place_name(chunk[number][0]), column, text)

        texts = dict[int, str]()
        for number, (_, row) in enumerate(chunk):
            is_asked = False
            try:
                cells = dataset.read_row(row)
                _check_question(cells)
                if self.tokenizer is not None:
                    texts[number] = self._render(cells)
                is_asked = True
                answers = self._check_score(cells)
                if answers and self.needs_answers:
                    self._note_answers(dataset, chunk[number][0], cells.reward_model["ground_truth"], answers)
            except MissingPackage:  # no mistake of the row
                raise
            except CellError as error:
                note(number, error.column, error)
            except Exception as error:  # templates, verifiers and environments raise anything
                note(number, _reward_column(row) if is_asked else dataset.prompt_key, error)
        for number, encoding_error in self._encoding_errors(texts):
            if number not in mistakes:
                note(number, dataset.prompt_key, encoding_error)
        return [mistakes[number] for number in sorted(mistakes)]

    def _note_answers(self, dataset: RLHFDataset, place: Any, truth: Any, answers: Sequence[str]) -> None:
        """Note golden answers that a policy can't or hardly give."""
        texts = []
        if has_empty_answer(truth):
            texts.append("an empty golden answer beside others, which nobody can give")
        if has_unusual_letters(answers):
            texts.append(
                "golden answers in full-width letters or with curly quotes, which are compared as written"
            )
        for text in texts:
            self.notes.setdefault(text, []).append(dataset.place_name(place))

    def _render(self, cells: ReadRow) -> str:
        """Return a row's prompt as text. Raises ValueError if the template refuses it."""
        try:
            text = prompt_text(self.tokenizer, cells.messages)
        except Exception as error:  # templates raise all kinds of errors for messages that they do not know
            roles = ", ".join(message["role"] for message in cells.messages)
            raise ValueError(
                f"found messages of the roles {roles}, which the chat template refuses ({error}); expected "
                "messages that it takes"
            ) from error
        return str(text)

    def _encoding_errors(self, texts: Mapping[int, str]) -> Iterator[tuple[int, Exception]]:
        """Yield each text that gives no tokens that the model knows, by its number."""
        if not texts:
            return
        encode = self._encode or self._encoder()
        try:
            encodings = encode(list(texts.values()))
        except Exception:  # one of the texts can't be encoded; they are asked one by one
            encodings = [None] * len(texts)
        checks_ids = self.vocab_size is not None and num_token_ids(self.tokenizer) > self.vocab_size
        for (number, text), encoding in zip(texts.items(), encodings, strict=True):
            try:
                ids = encode([text])[0] if encoding is None else encoding
                if len(ids) == 0 and not self._opening:
                    raise ValueError(f"found {short_repr(text)}, which has no token; expected a text")
                if checks_ids:
                    self._check_ids(list(getattr(ids, "ids", ids)))
            except Exception as error:  # tokenizers raise all kinds of errors
                yield number, error

    def _check_ids(self, ids: Sequence[int]) -> None:
        """Raise ValueError if the model does not know a token."""
        assert self.vocab_size is not None
        unknown = next((token_id for token_id in ids if token_id >= self.vocab_size), None)
        if unknown is not None:
            token = self.tokenizer.convert_ids_to_tokens(unknown)
            raise ValueError(
                f"found the token {token!r} with the id {unknown}; expected ids below {self.vocab_size}, the "
                "size of the model's vocabulary"
            )

    def _encoder(self) -> Callable[[Sequence[str]], list[Any]]:
        """Return a function that encodes many prompts like `encode_prompt`, but for what it puts in front."""
        tokenizer = self.tokenizer
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        if not hasattr(backend, "encode_batch_fast"):
            tokenizer = copy.deepcopy(tokenizer)
            self._encode = lambda texts: [encode_prompt(tokenizer, text) for text in texts]
            return self._encode
        backend = copy.deepcopy(backend)
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = False
        self._encode = lambda texts: backend.encode_batch_fast(texts, add_special_tokens=False)
        return self._encode

    def _check_score(self, cells: ReadRow) -> list[str]:
        """Return the golden answers that a row is compared with. Raise an error if it can't be scored."""
        assigned = assigned_verifiers(cells.reward_model, cells.columns)
        for entry in assigned:
            with self._verifier_lock:
                verifier = self.verifiers[entry.name]
            verifier_class: Any = type(verifier)  # mypy takes classes for values without a hash
            self._sources |= _source_files(verifier_class)
            verifier.check_label(entry.label)
        truth = cells.reward_model["ground_truth"]
        answers = list[str]()
        if self.needs_answers and not assigned and cells.env_class in SCORED_BY_ANSWERS:
            truth = with_golden_answers(cells.data_source, truth)
            answers = check_answers(truth)
            self._check_lengths(answers)
        if cells.env_class != SEARCH:
            _check_plain(truth)
            self._check_environment(cells)
        return answers

    def _check_lengths(self, answers: Sequence[str]) -> None:
        """Raise ValueError if no answer is short enough for a response."""
        longest = self.max_answer_tokens
        if longest is None or min(map(len, answers)) <= longest:  # most tokens have several letters
            return
        encode = self._encode or self._encoder()
        shortest = min(len(encode([answer])[0]) for answer in answers)
        if shortest > longest:
            raise ValueError(
                f"found golden answers of {shortest} tokens or more; expected one that fits into "
                f"data.max_response_length={longest}"
            )

    def _check_environment(self, cells: ReadRow) -> None:
        """Make the environment of a row as an episode does, and close it.

        An environment that runs in processes of its own is not made, because what it does may take long.
        """
        cls, default_kwargs = _environment_class(cells.env_class)
        is_cheap = isinstance(cls, type) and issubclass(cls, BaseTextEnv) and cls.runs != "process"
        if not is_cheap or cls.__module__.startswith("verl.environments.adapters"):
            return
        self._sources |= _source_files(cls)
        env_config = dict(self.env_config.get(cells.env_class, {}))
        extras = {"max_turns": self.max_turns, **cells.extras}
        env = make_environment(cls, {**default_kwargs, "env_config": env_config, "extras": extras})
        if cls.close is not BaseTextEnv.close and not inspect.iscoroutinefunction(cls.close):
            env.close()

    def key(self) -> str | None:
        """Return a digest of all that the look depends on, or None if that has no digest.

        These are the files, the settings, the tokenizer with its template, and the code that reads
        and scores rows.
        """
        facts = list[Any]()
        for dataset in self.datasets:
            files = dataset.files_of_rows()
            if files is None:
                return None
            facts.append([[_digest(Path(file).expanduser()) for file in files], dataset.config, len(dataset)])
            facts.append(repr(dataset.adapt))
        facts += [self.vocab_size, self.needs_answers, self.env_config, _code_digest()]
        facts += [self.max_turns, self.max_answer_tokens]
        facts.append(repr(self.verifiers.settings.config))
        if self.tokenizer is not None:
            facts.append(_tokenizer_facts(self.tokenizer))
        return hashlib.sha256(to_json(facts).encode("utf-8", "surrogatepass")).hexdigest()


def _check_question(cells: ReadRow) -> None:
    """Raise ValueError if a search has a prompt without a letter."""
    contents = (message.get("tool_calls") or message.get("content") or "" for message in cells.messages)
    is_blank = not any(str(content).strip() for content in contents)
    if is_blank and cells.env_class == SEARCH:
        raise ValueError("found a prompt without a letter; expected a question")


def _check_plain(truth: Any) -> None:
    """Raise ValueError if a ground truth holds what an environment would get as text of another form."""
    if isinstance(truth, Mapping | list | tuple | np.ndarray):
        for item in truth.values() if isinstance(truth, Mapping) else np.asarray(truth, object).ravel():
            _check_plain(item)
    elif not isinstance(truth, str | int | float | np.number | None):
        raise ValueError(f"found {short_repr(truth)} in the ground truth; expected texts and numbers")


def check_small_files(config: Config) -> None:
    """Look at the cells of a run's rows where the files are small, which takes no tokenizer and no torch.

    Larger files, and what only the tokenizer can tell, are looked at beside the loading of the models.

    Raises ValueError if rows can't be used.
    """
    data = config.data
    sources = sources_of(config)
    keys = ["val_files", "extra_val_files"]
    if data.mixture is None:
        keys.append("train_files")
    files = [Path(file).expanduser() for key in keys for file in as_list(data[key]) if file is not None]
    files += [Path(file).expanduser() for source in sources for file in source.files]
    if not all(path.is_file() for path in files) or any(source.env is not None for source in sources):
        return  # other checks say what is missing, or the rows are made by a library
    if data.streaming or sum(path.stat().st_size for path in files) > SMALL_BYTES:
        return
    train_rows = training_rows(config, None)
    datasets = list(train_rows.datasets if isinstance(train_rows, Mixture) else [train_rows])
    for key in ("val_files", "extra_val_files"):
        if data[key]:
            datasets.append(RLHFDataset(data[key], None, row_settings(config)))
    verifiers = Verifiers(VerifierSettings(config.verifiers, Path(config.trainer.default_local_dir)))
    try:
        RowCheck.of(config, datasets, None, None, verifiers).check()
    finally:
        verifiers.close()


def _reward_column(row: Mapping[str, Any]) -> str:
    """Return the column that a row's score depends on, for messages."""
    with suppress(CellError):
        named_reward = reward_cell(row)
        if named_reward is not None:
            return named_reward[0]
    return "reward_spec" if "reward_spec" in row else "reward_model"


@cache
def _environment_class(env_class: str) -> tuple[Any, Mapping[str, Any]]:
    return load_class(env_class)


@cache
def _source_files(cls: Any) -> frozenset[str]:
    """Return the file of a class of a user; an empty set for one of the project."""
    if cls.__module__.split(".")[0] == "verl":
        return frozenset()
    try:
        return frozenset({inspect.getfile(cls)})
    except (TypeError, OSError):
        return frozenset({f"no file of {cls.__module__}"})  # is never remembered


def _tokenizer_facts(tokenizer: Any) -> list[Any]:
    """Return what a tokenizer's results depend on."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    table = backend.to_str() if hasattr(backend, "to_str") else sorted(tokenizer.get_vocab().items())
    return [type(tokenizer).__name__, table, tokenizer.chat_template, opening_ids(tokenizer)]


@cache
def _code_digest() -> str:
    """Return the digest of the code that reads, renders and scores rows."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for folder in ("data", "environments", "verifiers", "utils"):
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


@cache
def _digest_of(path: Path, size: int, mtime: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(path: Path) -> str:
    """Return the digest of a file; a file that has not changed is read once in a process."""
    status = path.stat()
    return _digest_of(path, status.st_size, status.st_mtime_ns)


def memory_folder() -> Path:
    """Return the folder in which looks at rows are remembered."""
    cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache_home) / "verl" / "checked_rows"


def _is_remembered(key: str) -> bool:
    """Return whether a look without mistakes is remembered, and its users' classes are what they were."""
    try:
        digests = json.loads((memory_folder() / key).read_text(encoding="utf-8"))
        return all(_digest(Path(file)) == digest for file, digest in digests.items())
    except (OSError, ValueError, AttributeError):
        return False


def _remember(key: str, sources: Iterable[str]) -> None:
    """Remember a look; a folder that can't be written is no mistake."""
    with suppress(OSError):
        text = json.dumps({file: _digest(Path(file)) for file in sources})
        memory_folder().mkdir(parents=True, exist_ok=True)
        temporary = memory_folder() / f"{key}.{os.getpid()}"
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, memory_folder() / key)
