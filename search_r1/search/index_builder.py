"""Build an index: `python -m search_r1.search.index_builder --retrieval_method bm25 --corpus_path F`.

    arguments -> check_arguments (in a moment) -> check_corpus: broken lines, double ids -> exit 2
              -> plan_jobs -> indexing/job.py: builds, resumes -> <save_dir>/...

    bm25, lucene              -> <save_dir>/bm25, <save_dir>/lucene                  folders
    e5 --faiss_type exact     -> <save_dir>/e5_exact                                 folder
    e5 (--faiss_type T)       -> <save_dir>/e5_<T>.index, T = Flat unless told        FAISS file
       ... --save_embedding   -> <save_dir>/e5_exact before, which the file is made from

The flags are those of Search-R1's builder, and some more. If a build is stopped or killed, the same command
goes on where it was. Each index gets a manifest, and the server checks it against the corpus that it is
started with. Heavy modules (numba, Java, torch, faiss) are imported when a job runs.
"""

from __future__ import annotations

import argparse
import difflib
import os
import signal
import sys
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import FrameType
from typing import Any

if not __package__:  # started by its path, as Search-R1's own builder is
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from search_r1.search.backend_plan import (
    DEFAULT_MODELS,
    DENSE,
    ONLINE,
    SPARSE,
    check_at_least,
    check_model_folder,
    check_packages,
)
from search_r1.search.corpus import Corpus
from search_r1.search.dense.faiss_gpus import load_gpu_build
from search_r1.search.indexing.corpus_check import CorpusReport, check_corpus
from search_r1.search.indexing.job import IndexJob, run_job
from search_r1.search.long_work import Progress, progress_lines
from search_r1.search.manifest import check_manifest
from verl.utils.hub import use_cache_if_hub_is_away
from verl.utils.text import printable

PROGRAM = ["python", "-m", "search_r1.search.index_builder"]
EXACT = "exact"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=" ".join(PROGRAM),
        description="Build an index of a corpus. The same command goes on where a stopped one was.",
    )
    add = parser.add_argument_group("what is built").add_argument
    add("--retrieval_method", help="bm25, lucene, or the name of a dense encoder: e5, bge, ...")
    add("--corpus_path", required=True, help='jsonl(.gz, .bz2) file, lines {"id", "contents"}')
    add("--save_dir", default="indexes/", help="folder that gets the index (default: indexes/)")
    add("--overwrite", action="store_true", help="replace an index of another corpus or flags")
    add("--check_only", action="store_true", help="check the corpus and build nothing")
    add("--allow_duplicate_ids", action="store_true", help="ids may stand in several lines")
    add = parser.add_argument_group("how it is built").add_argument
    add("--num_processes", type=int, default=0, help="default: one for each CPU, at most 8")
    add("--memory_limit_gb", type=float, default=4.0, help="of the bm25 builder (default: 4)")
    add = parser.add_argument_group("dense encoders").add_argument
    add("--model_path", help="folder or hub id of the encoder")
    add("--max_length", type=int, default=180, help="tokens of a passage (default: 180)")
    add("--batch_size", type=int, default=512, help="no effect: batches are cut by tokens")
    add("--use_fp16", action="store_true", help="encode and keep vectors in half precision")
    add("--pooling_method", help="mean, cls, last, max; default: as the model asks for")
    faiss_help = "FAISS factory string: Flat (default), HNSW64, IVF4096,Flat, ...; exact: no FAISS, the index"
    add("--faiss_type", help=f"{faiss_help} of the server's own exact search, half as large with --use_fp16")
    add("--faiss_gpu", action="store_true", help="let FAISS train on the GPUs (extra faiss-gpu)")
    add("--save_embedding", action="store_true", help="keep <method>_exact beside a FAISS file")
    add("--embedding_path", help="vectors that are there already, as --save_embedding wrote them")
    return parser


def check_arguments(arguments: argparse.Namespace) -> None:
    """Raise ValueError for flags that can't work and for packages that are missing. Nothing is loaded."""
    check_at_least(arguments, 1, "max_length")
    check_at_least(arguments, 0, "num_processes")
    check_at_least(arguments, 0.25, "memory_limit_gb")
    if not arguments.check_only:
        _check_method(arguments)
    if not Path(arguments.corpus_path).is_file():
        raise ValueError(f"--corpus_path: there is no file {arguments.corpus_path}")


def _check_method(arguments: argparse.Namespace) -> None:
    if not arguments.retrieval_method:
        raise ValueError("--retrieval_method is missing: bm25, lucene, or the name of a dense encoder")
    method = arguments.retrieval_method.lower()
    actual = f"found {arguments.retrieval_method!r}"
    if method in SPARSE:
        return check_packages(method)
    if method in ONLINE or "+" in method or "/" in method:
        expected = "bm25, lucene, or one dense encoder's name, like e5 (its files by --model_path)"
        raise ValueError(f"--retrieval_method: {actual}, expected {expected}")
    close_names = difflib.get_close_matches(method, (*SPARSE, *DENSE), n=1, cutoff=0.7)
    model = arguments.model_path or DEFAULT_MODELS.get(method)
    if close_names and close_names[0] != method and (close_names[0] in SPARSE or model is None):
        raise ValueError(f"--retrieval_method: {actual}; did you mean {close_names[0]!r}?")
    if model is None:
        example = "for example intfloat/e5-base-v2"
        raise ValueError(f"--model_path is missing: the encoder for {method!r}, {example}")
    check_packages(EXACT if arguments.faiss_type == EXACT else "faiss", arguments.faiss_gpu)
    if arguments.faiss_gpu and arguments.faiss_type not in (None, "Flat", EXACT):
        load_gpu_build()
    check_model_folder("--model_path", model)
    if arguments.embedding_path is not None:
        path = Path(arguments.embedding_path)
        if not path.exists():
            raise ValueError(f"--embedding_path: there is no {path}")
        if path.is_dir() and (arguments.faiss_type == EXACT or arguments.save_embedding):
            raise ValueError(f"--embedding_path: {path} is an exact index already; give a --faiss_type")


def check_corpus_or_raise(arguments: argparse.Namespace, progress: Progress) -> CorpusReport:
    """Check the corpus and report on it.

    Raises ValueError that names the first broken lines and double ids.
    """
    checked = check_corpus(arguments.corpus_path, progress=progress)
    sizes = f"{checked.num_documents:,} documents, {checked.num_bytes:,} bytes"
    report(f"{checked.path}: {sizes}, sha256 {checked.sha256}")
    faults = []
    for group, description, is_allowed in (
        (checked.empty_documents, "documents without text", True),
        (checked.broken_lines, "broken lines; mend or remove them", False),
        (checked.duplicate_ids, "ids that stand in several lines", arguments.allow_duplicate_ids),
    ):
        text = f"{checked.path} has {group.count:,} {description}: {group}"
        if group.count and is_allowed:
            report(f"note: {text}")
        elif group.count:
            faults.append(text)
    if checked.duplicate_ids.count and not arguments.allow_duplicate_ids:
        faults.append("  (--allow_duplicate_ids builds an index although ids stand in several lines)")
    if faults:
        raise ValueError("\n".join(faults))
    return checked


def plan_jobs(arguments: argparse.Namespace, corpus: Corpus) -> list[IndexJob]:
    """Return the indexes to build, in this order.

    Raises ValueError for vectors of another corpus.
    """
    method = arguments.retrieval_method.lower()
    folder = Path(arguments.save_dir)
    num_processes = arguments.num_processes or min(len(os.sched_getaffinity(0)), 8)

    def build_bm25(corpus: Corpus, folder: Path, progress: Progress) -> dict[str, Any]:
        from search_r1.search.bm25 import build_index

        return build_index(corpus, folder, progress, int(arguments.memory_limit_gb * 2**30), num_processes)

    def build_lucene(corpus: Corpus, folder: Path, progress: Progress) -> dict[str, Any]:
        from search_r1.search.lucene import build_index

        return build_index(corpus, folder, num_processes, progress)

    if method == "bm25":
        # Building takes 1.5 times the corpus on real passages. Passages of a few words take more.
        return [IndexJob(folder / "bm25", "bm25", {}, build_bm25, needed_bytes=3 * corpus.num_bytes)]
    if method == "lucene":
        return [IndexJob(folder / "lucene", "lucene", {}, build_lucene, needed_bytes=corpus.num_bytes)]
    # What follows is for a dense encoder.
    names = ("retrieval_method", "model_path", "pooling_method", "max_length", "use_fp16", "embedding_path")
    request = {name: getattr(arguments, name) for name in names}
    vectors = Path(arguments.embedding_path) if arguments.embedding_path else None
    if vectors is not None and vectors.is_file():
        request["embedding_file"] = [vectors.stat().st_size, vectors.stat().st_mtime_ns]
    exact_target = folder / f"{arguments.retrieval_method}_exact"
    faiss_type = arguments.faiss_type or "Flat"
    exact_source = exact_target if arguments.save_embedding else None  # where the FAISS file has its vectors
    if vectors is not None and vectors.is_dir():
        if check_manifest(vectors, corpus, expected_backend=EXACT) is None:
            raise ValueError(f"--embedding_path: {vectors} is no folder that --save_embedding wrote")
        exact_source = vectors

    def build_exact(corpus: Corpus, folder: Path, progress: Progress) -> dict[str, Any]:
        import torch

        from search_r1.search.dense.embeddings import write_embeddings
        from search_r1.search.dense.encoder import Encoder

        dtype = "float16" if arguments.use_fp16 else "float32"
        options = {
            "pooling": arguments.pooling_method,
            "max_passage_length": arguments.max_length,
            "dtype": None if arguments.use_fp16 else dtype,  # None: the best half precision of the device
        }
        name = arguments.retrieval_method
        model = arguments.model_path or DEFAULT_MODELS[method]
        use_cache_if_hub_is_away({"--model_path": model})
        devices = [f"cuda:{number}" for number in range(torch.cuda.device_count())] or ["cpu"]
        encoders = [Encoder(name, model, device, **options) for device in devices]
        return write_embeddings(corpus, folder, encoders, dtype, progress, vectors)

    def build_faiss(corpus: Corpus, folder: Path, progress: Progress) -> dict[str, Any]:
        from search_r1.search.dense.embeddings import FILES, map_vectors, open_embeddings
        from search_r1.search.dense.faiss_index import INDEX_FILE, build_index

        if exact_source is not None:
            source, stored = open_embeddings(exact_source)
        else:
            source = build_exact(corpus, folder, progress)
            stored = map_vectors(folder / FILES[source["dtype"]], source["dtype"], source["dimension"])
        build_index(stored, folder / INDEX_FILE, faiss_type, arguments.faiss_gpu, progress)
        return {"encoder": source["encoder"], "faiss_type": faiss_type, "dimension": source["dimension"]}

    exact = IndexJob(exact_target, EXACT, request, build_exact)
    if faiss_type == EXACT:
        return [exact]
    target = folder / f"{arguments.retrieval_method}_{faiss_type}.index"
    request = request | {"faiss_type": faiss_type}
    faiss = IndexJob(target, "faiss", request, build_faiss, file_name="faiss.index")
    return [exact, faiss] if arguments.save_embedding else [faiss]


def run(arguments: argparse.Namespace, command: list[str]) -> None:
    """Check the flags and the corpus, and build the indexes.

    Args:
        arguments: The parsed flags.
        command: The command line, which the manifest keeps.

    Raises:
        ValueError: For all that the user can mend.
    """
    check_arguments(arguments)
    progress = progress_lines(report)
    checked = check_corpus_or_raise(arguments, progress)
    if arguments.check_only:
        report("the corpus is in order")
        return
    with Corpus.open(checked.path, progress) as corpus:
        for job in plan_jobs(arguments, corpus):
            built = run_job(job, corpus, checked, arguments.overwrite, command, progress, report)
            print(f"built {job.target}" if built else f"{job.target} is built already", flush=True)


def report(line: str) -> None:
    print(printable(line), file=sys.stderr, flush=True)


def _stop(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main(argv: list[str] | None = None) -> int:
    """Run the builder and return its exit status.

    Returns:
        0 if the index was built or there already, 2 for the user's mistakes, 1 for what the machine lacks
        (disk, memory), 130 after Ctrl-C or SIGTERM.
    """
    words = sys.argv[1:] if argv is None else argv
    arguments = build_parser().parse_args(words)
    old_handler = signal.signal(signal.SIGTERM, _stop)
    resume_hint = "the same command goes on where this one was"
    try:
        run(arguments, [*PROGRAM, *words])
        return 0
    except KeyboardInterrupt:
        message = f"stopped; {resume_hint}"
        status = 130
    except ValueError as error:
        message = f"error: {error}"
        status = 2
    except OSError as error:
        file_hint = f" ({error.filename})" if error.filename else ""
        message = f"error: {error.strerror or error}{file_hint}; mend this, and {resume_hint}"
        status = 1
    except (MemoryError, BrokenProcessPool):
        remedy = f"Give fewer --num_processes or a lower --memory_limit_gb; {resume_hint}"
        message = f"error: out of memory: a process was killed, or an allocation failed. {remedy}"
        status = 1
    finally:
        signal.signal(signal.SIGTERM, old_handler)
    report(message)
    return status


if __name__ == "__main__":
    sys.exit(main())
