"""Search-R1's retrieval without a server: the questions of a data set through a backend.

    <dataset_path>/<data_split>.jsonl, {"question": ...} a line -> its first 512 questions
        -> <index_path>/<method>_Flat.index or <index_path>/bm25
        -> stdout, a line each: {"question": ..., "documents": [...], "scores": [...]}

The flags are Search-R1's. (Search-R1 prints and saves nothing of what it retrieves.)
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import islice
from pathlib import Path

from verl.utils.text import printable

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # this folder's files are no packages of their own

MAX_QUESTIONS = 512


def main(argv: list[str] | None = None) -> int:
    """Print what is retrieved.

    Returns:
        The exit status: 2 for a mistake in the flags or the files, else 0.
    """
    from search_r1.search.launch import add_backend_arguments, check_backend_arguments, open_retriever

    parser = argparse.ArgumentParser(description="Retrieval for the questions of a data set")
    add = parser.add_argument
    add("--retrieval_method", required=True, help="bm25, or a dense encoder: e5, bge, ...")
    add("--retrieval_topk", type=int, default=10, help="documents per question")
    add("--index_path", required=True, help="folder of <method>_Flat.index, or of bm25/")
    add("--corpus_path", required=True, help="jsonl file of the passages")
    add("--dataset_path", required=True, help="folder of <data_split>.jsonl")
    add("--data_split", default="train")
    add("--retrieval_model_path", help="folder or hub name of the encoder")
    add("--retrieval_pooling_method", default="mean")
    add("--retrieval_query_max_length", type=int, default=256)
    add("--retrieval_batch_size", type=int, default=512, help="questions at once")
    add("--faiss_gpu", help="no effect: a GPU is used if there is one")
    add("--retrieval_use_fp16", action="store_true", help="no effect: as the device has it")
    arguments = parser.parse_args(argv)
    method = arguments.retrieval_method
    folder = Path(arguments.index_path)
    flags = {
        "--retriever_name": method,
        "--corpus_path": arguments.corpus_path,
        "--index_path": folder / "bm25",
    }
    if method != "bm25":
        flags["--index_path"] = folder / f"{method}_Flat.index"
        flags["--pooling_method"] = arguments.retrieval_pooling_method
        flags["--query_max_length"] = arguments.retrieval_query_max_length
        if arguments.retrieval_model_path:
            flags["--retriever_model"] = arguments.retrieval_model_path
    backend_parser = argparse.ArgumentParser()
    add_backend_arguments(backend_parser)
    backend = backend_parser.parse_args([str(word) for flag in flags.items() for word in flag])
    try:
        questions = _questions(Path(arguments.dataset_path) / f"{arguments.data_split}.jsonl")
        check_backend_arguments(backend)
        retriever = open_retriever(backend, lambda line: print(line, file=sys.stderr))
    except ValueError as error:
        print(f"error: {printable(error)}", file=sys.stderr)
        return 2
    try:
        for start in range(0, len(questions), arguments.retrieval_batch_size):
            batch = questions[start : start + arguments.retrieval_batch_size]
            documents, scores = retriever.batch_search(batch, arguments.retrieval_topk)
            for question, row, row_scores in zip(batch, documents, scores, strict=True):
                fields = {"question": question, "documents": [document.fields for document in row]}
                print(json.dumps(fields | {"scores": [float(score) for score in row_scores]}))
    finally:
        retriever.close()
    return 0


def _questions(path: Path) -> list[str]:
    try:
        with path.open(encoding="utf-8") as lines:
            questions = [json.loads(line)["question"] for line in islice(lines, MAX_QUESTIONS)]
    except OSError as error:
        raise ValueError(f"--dataset_path: can't read {path} ({error.strerror})") from None
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"--dataset_path: {path}: expected a JSON object with 'question' a line") from None
    return questions


if __name__ == "__main__":
    sys.exit(main())
