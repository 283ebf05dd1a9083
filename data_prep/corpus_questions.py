"""Questions from a corpus, written by a model: the first half of `python -m verl.synthesis --corpus`.

corpus.jsonl -> passages drawn with a seed -> the model writes a question and its answer on each
             -> NAME_questions.parquet: rows to be asked;  rejected.jsonl: the others, and why
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from data_prep.files import make_row, tidy_question, write_parquet
from data_prep.prompts import SEARCH_PROMPT, fill_prompt, read_template
from search_r1.search.corpus import Corpus
from verl.environments import BaseTextEnv, BaseTextEnvStepOutput
from verl.utils.json_files import write_lines
from verl.utils.reward_score.qa_em import normalize_answer

PROMPT = (
    "Passage: {question}\n\n"
    "Write one question that the passage above answers. It has to be clear to somebody who does not see the "
    "passage: call people, places and works by their names. The answer is a name, a number or a few words, "
    "copied from the passage. Write nothing but <question>the question</question><answer>the answer</answer>."
    "\n"
)
MOST_WORDS = 8  # words of an answer, at most
_PAIR = re.compile(r"<question>((?:(?!</?question>).)*)</question>\s*<answer>(.*?)</answer>", re.DOTALL)


def parse_question(text: str, passage: str) -> tuple[str, str, str]:
    """Return the question and the answer that a model wrote on a passage, and what is wrong with them.

    The last is "" if nothing is wrong.
    """
    match = _PAIR.search(text)
    if match is None:
        return "", "", "no <question>..</question><answer>..</answer>"
    question = tidy_question(" ".join(match[1].split()))
    answer = " ".join(match[2].split())
    words = normalize_answer(answer)
    if not words or len(words.split()) > MOST_WORDS:
        return question, answer, f"an answer of no words or more than {MOST_WORDS}"
    if f" {words} " not in f" {normalize_answer(passage)} ":
        return question, answer, "the answer is not in the passage"
    if f" {words} " in f" {normalize_answer(question)} ":
        return question, answer, "the question tells its answer"
    return question, answer, ""


class WritesQuestion(BaseTextEnv):
    """An environment of one turn: reward 1 for a question whose answer is in the row's passage, else 0."""

    counts_turns = stateless = True
    stop = ("</answer>",)
    runs = "inline"

    def __init__(self, env_config: Any = None, extras: Any = None) -> None:
        super().__init__(env_config, extras)
        self.passage = extras["extra_info"]["passage"]

    def step(self, action: str) -> BaseTextEnvStepOutput:
        problem = parse_question(action, self.passage)[2]
        return BaseTextEnvStepOutput(observations=[], reward=float(not problem), done=True, metadata={})


def write_passages(corpus_path: Path, count: int, seed: int, folder: Path) -> Path:
    """Write rows that ask a model for questions on `count` passages; return their file.

    The file has the corpus's name. Raises ValueError if the corpus can't be read.
    """
    with Corpus.open(corpus_path) as corpus:
        chosen = sorted(random.Random(seed).sample(range(len(corpus)), min(count, len(corpus))))
        documents = corpus.rows(chosen)
    rows = []
    for number, document in zip(chosen, documents, strict=True):
        passage = document.contents
        passage_info = {"title": passage.partition("\n")[0].strip('" '), "passage": passage}
        row = make_row("corpus", fill_prompt(PROMPT, passage), "", [], "train", number, **passage_info)
        rows.append(row | {"env_class": f"{__name__}:{WritesQuestion.__name__}"})
    path = folder / f"{corpus_path.name.split('.jsonl')[0]}.parquet"
    write_parquet(path, rows)
    return path


def questions_file(folder: Path) -> Path:
    """Return the file of the questions on a corpus, in the folder with what the model wrote."""
    return folder / f"{folder.name}_questions.parquet"


def write_questions(lines: Iterable[Mapping[str, Any]], model: str, template: str, folder: Path) -> Path:
    """Write rows of the questions that a model wrote, each once; return their file.

    `lines` are those of results. Raises ValueError if there is no question.
    """
    path = questions_file(folder)
    rows: list[dict[str, Any]] = []
    rejected = []
    seen = set[str]()
    for line in lines:
        passage_info = line["info"]
        question, answer, problem = parse_question(line["completion"], passage_info["passage"])
        if not problem and normalize_answer(question) in seen:
            problem = "a duplicate"
        if problem:
            rejected.append({**line, "rejected": problem})
            continue
        seen.add(normalize_answer(question))
        question_info = {
            "gold_titles": [passage_info["title"]],
            "passage_row": passage_info["index"],
            "written_by": model,
        }
        prompt = fill_prompt(template, question)
        rows.append(make_row("corpus", prompt, question, [answer], "train", len(rows), **question_info))
    write_lines(folder / "rejected.jsonl", rejected)
    passages = f"{len(rows) + len(rejected):,} passages"
    print(f"{len(rows):,} questions on {passages}; {folder}/rejected.jsonl has the others", flush=True)
    if not rows:
        raise ValueError(f"{folder}: found no question in {len(rejected)} texts; rejected.jsonl says why.")
    write_parquet(path, rows)
    return path


class CorpusQuestions:
    """Questions on a corpus whose prompts have one template.

    Raises ValueError if the file of the template can't be used.
    """

    def __init__(self, template: Path | None) -> None:
        """Read the template of the prompts, with {question} in it; None stands for Search-R1's."""
        self.template = SEARCH_PROMPT if template is None else read_template(template)

    def write_passages(self, corpus_path: Path, count: int, seed: int, folder: Path) -> Path:
        return write_passages(corpus_path, count, seed, folder)

    def questions_file(self, folder: Path) -> Path:
        return questions_file(folder)

    def write_questions(self, lines: Iterable[Mapping[str, Any]], model: str, folder: Path) -> Path:
        return write_questions(lines, model, self.template, folder)
