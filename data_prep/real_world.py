"""A small real world for tests and evaluation: 6,359 Wikipedia passages, and questions on them.

    python -m data_prep.real_world --files FOLDER --out data/real

FOLDER holds four published files:
    xquad.en.json                    240 passages, 1,190 questions on them    (google-deepmind/xquad)
    2wikimultihopqa_corpus.json      6,119 passages                           (OSU-NLP-Group/HippoRAG)
    hotpot_dev_v1_simplified.json    7,405 questions                          (ysymyth/ReAct)
    NQ-open.dev.jsonl                3,610 questions                          (natural-questions)

    -> corpus.jsonl                        the 6,359 passages
       train.parquet, test.parquet         XQuAD's questions; `extra_info.gold_ids` names the passage
       nq_hotpotqa/{train,test}.parquet    questions whose answers this corpus holds by chance only: for a
                                           larger index, and to see what a policy does without help
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

from data_prep import squad
from data_prep.files import write_parquet
from data_prep.qa_search import add_prompts, merge
from data_prep.qa_sources import Questions, read_questions

XQUAD = "xquad.en.json"
PASSAGES = "2wikimultihopqa_corpus.json"
QUESTION_SETS = {"nq": "NQ-open.dev.jsonl", "hotpotqa": "hotpot_dev_v1_simplified.json"}
EXPECTED = {"passages": 6359, "XQuAD questions": 1190, "nq questions": 3610, "hotpotqa questions": 7405}


def convert(files: Path, out: Path, test_share: float, seed: int, template: str) -> dict[str, int]:
    """Writes the corpus and the rows; returns what was read (keys of EXPECTED).

    Raises ValueError for a missing or malformed file.
    """
    counts = squad.convert([files / XQUAD], [files / PASSAGES], out, test_share, seed, template)
    read = {source: read_questions(source, files / name) for source, name in QUESTION_SETS.items()}
    parts: dict[str, list[tuple[str, Questions]]] = {"train": [], "test": []}
    for source, whole in read.items():
        questions = list(whole.questions)
        random.Random(f"{source} {seed}").shuffle(questions)
        num_test = round(len(questions) * test_share)
        parts["test"].append((source, Questions(whole.path, questions[:num_test])))
        parts["train"].append((source, Questions(whole.path, questions[num_test:])))
    for split, sources in parts.items():
        rows = merge(sources, split)
        add_prompts(rows, template)
        write_parquet(out / "nq_hotpotqa" / f"{split}.parquet", rows)
    xquad = counts["train questions"] + counts["test questions"]
    total = {"passages": counts["passages"], "XQuAD questions": xquad}
    return total | {f"{source} questions": len(whole.questions) for source, whole in read.items()}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Four published files -> a corpus and rows.")
    parser.add_argument("--files", type=Path, required=True, help="folder with the four files")
    parser.add_argument("--out", type=Path, default=Path("data/real"), help="where to write (data/real)")
    parser.add_argument("--test-share", type=float, default=0.25, help="share for testing (0.25)")
    parser.add_argument("--seed", type=int, default=0, help="which questions are for testing (0)")
    squad.add_prompt_flags(parser)
    options = parser.parse_args(argv)
    try:
        template = squad.chosen_template(options)
        counts = convert(options.files, options.out, options.test_share, options.seed, template)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print("\n".join(f"{name}: {count:,}" for name, count in counts.items()))
    if counts != EXPECTED:
        print(f"error: expected {EXPECTED}: these are other versions of the files", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
