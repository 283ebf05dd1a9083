"""Turn command line flags into a search backend, for the server, the evaluation and the benchmarks.

    add_backend_arguments(parser) -> flags -> check_backend_arguments (cheap) -> open_retriever (loads)
                                              |                                   |
                                              plan_backends (backend_plan.py)     backends -> hybrid -> rerank

The flags are Search-R1's. What can be told from flags and file names is checked before anything loads,
because an index may take many minutes to read. `main` checks it even before anything is installed, so this
file can be imported with Python alone.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from search_r1.search.backend_plan import (
    ONLINE,
    SPARSE,
    BackendPlan,
    check_at_least,
    check_model_folder,
    check_packages,
    extras_of,
    plan_backends,
)
from search_r1.search.dense.encoder_settings import network_names
from search_r1.search.dense.faiss_gpus import check_gpu_copy, check_kind
from search_r1.search.long_work import progress_lines
from search_r1.search.manifest import check_manifest, read_manifest
from search_r1.search.search_backend import SearchBackend
from verl.utils.hub import use_cache_if_hub_is_away
from verl.utils.text import printable

if TYPE_CHECKING:
    from search_r1.search.corpus import Corpus

MAX_TOPK = 1000
API_KEY_VARIABLE = "SEARCH_R1_API_KEY"

Report = Callable[[str], None]


def _setting(default: float, help_text: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": help_text})


@dataclasses.dataclass(frozen=True)
class BatchSettings:
    """The settings by which the server gathers queries (serving/batching.py).

    Their flags have the same names.
    """

    max_batch: int = _setting(256, "distinct queries in one call of the backend")
    max_wait_ms: float = _setting(20.0, "longest time a batch is held to grow; 0: never")
    max_queue: int = _setting(32_768, "queries searched or waiting; more are refused with 503")
    cache_size: int = _setting(50_000, "answers kept in memory; 0: none")
    request_timeout_s: float = _setting(120.0, "from a request's arrival; then it gets 504")

    def __post_init__(self) -> None:
        check_at_least(self, 1, "max_batch", "max_queue")
        check_at_least(self, 0, "max_wait_ms", "cache_size")
        if not 0 < self.request_timeout_s < math.inf:
            raise ValueError(f"--request_timeout_s: found {self.request_timeout_s}, expected more than 0")


def build_server_parser() -> argparse.ArgumentParser:
    """Return a parser with all flags of the server."""
    parser = argparse.ArgumentParser(prog="python -m search_r1.search.server", description="Retrieval server")
    add_backend_arguments(parser)
    add = parser.add_argument_group("how it is served").add_argument
    add("--topk", type=int, default=3, help="documents per query when a request does not say")
    add("--host", default="0.0.0.0", help="where to listen; 127.0.0.1: this machine only")
    add("--port", type=int, default=8000, help="0: any free port, printed at the start")
    add("--workers", type=int, default=1, help="server processes on the port (CPU backends)")
    for field in dataclasses.fields(BatchSettings):
        kind = type(field.default)
        add(f"--{field.name}", type=kind, default=field.default, help=field.metadata["help"])
    add("--api_key", help=f"asked of clients; better given in the environment as {API_KEY_VARIABLE}")
    return parser


def check_server_arguments(arguments: argparse.Namespace, is_installed: bool = True) -> BatchSettings:
    """Return the batch settings in the flags.

    Raises ValueError for flags that can't be served, before anything is loaded.
    """
    check_backend_arguments(arguments, is_installed)
    for name, maximum in {"topk": MAX_TOPK, "workers": 256}.items():
        if not 1 <= getattr(arguments, name) <= maximum:
            raise ValueError(f"--{name}: found {getattr(arguments, name)}, expected 1 to {maximum}")
    names = (field.name for field in dataclasses.fields(BatchSettings))
    return BatchSettings(**{name: getattr(arguments, name) for name in names})


def add_backend_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all flags that choose and configure a backend."""
    add = parser.add_argument_group("what is searched").add_argument
    add("--corpus_path", help='jsonl(.gz, .bz2) file, lines {"id", "contents"}')
    add("--index_path", help="the index; without it bm25 is built in memory. Hybrid: A,B")
    names = "bm25 (default), lucene, a dense encoder (e5, bge, ...), or online: serpapi, google"
    add("--retriever_name", default="bm25", help=f"{names}; two with + between them are fused (bm25+e5)")
    add("--num_threads", type=int, default=1, help="threads of a search (default: 1)")
    add("--verify", action="store_true", help="compare the whole corpus and index with the manifest")
    add = parser.add_argument_group("dense encoders").add_argument
    add("--retriever_model", help="folder or hub name; default: what the index was built with")
    add("--pooling_method", help="mean, cls, last or max; default: the model's own")
    add("--query_max_length", type=int, help="in tokens (default: 256)")
    add("--device", help="cpu, cuda, cuda:1; default: GPUs if there are any")
    add("--faiss_gpu", action="store_true", help="search a FAISS index on all GPUs (extra faiss-gpu)")
    add("--faiss_nprobe", type=int, help="lists that an IVF index looks into")
    add = parser.add_argument_group("hybrid and rerank").add_argument
    add("--hybrid_depth", type=int, default=100, help="documents asked of each (default: 100)")
    add("--reranker_model", help="cross-encoder over what is found; folder or hub name")
    add("--retrieval_topk", type=int, default=10, help="documents that the reranker reads (default: 10)")
    # Search-R1's reranking server has this name for --topk.
    add("--reranking_topk", type=int, dest="topk", default=argparse.SUPPRESS, help="the same as --topk")
    add("--reranker_batch_size", type=int, default=32, help="pairs at once (default: 32)")
    add("--reranker_max_length", type=int, default=512, help="tokens of a pair (default: 512)")
    keys = "Keys come from the environment: SERPAPI_API_KEY; GOOGLE_API_KEY and GOOGLE_CSE_ID."
    add = parser.add_argument_group("online search", keys).add_argument
    add("--search_url", help="address of the engine, when it is not the usual one")
    add("--serp_api_key", help="seen by everybody on this machine: better by SERPAPI_API_KEY")
    add("--serp_engine", default="google", help="engine behind SerpAPI (default: google)")
    add("--cse_id", help="Google's search engine id; default: GOOGLE_CSE_ID")
    add("--snippet_only", action="store_true", help="no effect: documents are always the engine's snippets")
    add("--search_rate", type=float, default=5, help="requests per second (default: 5)")
    add("--search_timeout", type=float, default=20, help="seconds for a batch (default: 20)")


def check_backend_arguments(arguments: argparse.Namespace, is_installed: bool = True) -> None:
    """Raise ValueError for flags that can't work, before anything is loaded.

    With `is_installed`, packages and keys that are missing count as well.
    """
    counts = ("num_threads", "query_max_length", "faiss_nprobe", "hybrid_depth", "retrieval_topk")
    check_at_least(arguments, 1, *counts, "reranker_batch_size", "reranker_max_length")
    if arguments.corpus_path and not Path(arguments.corpus_path).is_file():
        raise ValueError(f"--corpus_path: there is no file {arguments.corpus_path}")
    plans = plan_backends(arguments.retriever_name, arguments.index_path, arguments.retriever_model)
    for plan in plans:
        if plan.model is not None:
            check_model_folder("--retriever_model", plan.model)
        if not arguments.corpus_path and plan.kind not in ONLINE:
            raise ValueError("--corpus_path is missing: the jsonl file that holds the passages")
        if is_installed and plan.kind in ONLINE:
            from search_r1.search.online.online_retriever import online_engine

            online_engine(plan.kind, arguments)
        elif is_installed:
            check_packages(plan.kind, arguments.faiss_gpu)
    kinds = {plan.kind for plan in plans}
    if arguments.faiss_gpu and "faiss" not in kinds and "exact" in kinds:
        raise ValueError("--faiss_gpu: the index is not a FAISS file; an exact index uses the GPUs by itself")
    if arguments.faiss_nprobe and "faiss" not in kinds:
        raise ValueError("--faiss_nprobe is for FAISS index files")
    if arguments.faiss_gpu:
        for plan in plans:
            if plan.kind == "faiss" and plan.index_path is not None:
                check_copy = check_gpu_copy if is_installed else check_kind
                check_copy(plan.index_path)
    if arguments.verify and not arguments.corpus_path:
        raise ValueError("--verify compares the corpus with the index: --corpus_path is missing")
    if arguments.reranker_model:
        if is_installed:
            check_packages("rerank")
        check_model_folder("--reranker_model", arguments.reranker_model)


def models_of(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the models that a backend loads, by what names them: folders, or names on the hub.

    Args:
        arguments: The flags of `add_backend_arguments`.

    Raises:
        ValueError: For flags that can't work.
    """
    models: dict[str, str] = {}
    for plan in plan_backends(arguments.retriever_name, arguments.index_path, arguments.retriever_model):
        if plan.kind in ONLINE or plan.kind in SPARSE:
            continue
        model = plan.model
        manifest = None if plan.index_path is None else read_manifest(plan.index_path)
        if model is None and manifest is not None:
            model = manifest.parameters.get("encoder", {}).get("model")
        if model is not None:
            for_queries, for_passages = network_names(model)
            models["--retriever_model"] = for_queries
            if for_passages != for_queries:
                models["--retriever_model for passages"] = for_passages
    if arguments.reranker_model:
        models["--reranker_model"] = arguments.reranker_model
    return models


def open_retriever(arguments: argparse.Namespace, report: Report = print) -> SearchBackend:
    """Load the corpus and the backends, which takes from a second to many minutes.

    Args:
        arguments: The flags of `add_backend_arguments`.
        report: Gets lines of progress.

    Raises:
        ValueError: For a broken corpus, an index that does not belong to it, and a model that can't be read,
            or that is neither on this machine nor to be had from the hub.
    """
    from search_r1.search.corpus import Corpus

    plans = plan_backends(arguments.retriever_name, arguments.index_path, arguments.retriever_model)
    if models := models_of(arguments):
        use_cache_if_hub_is_away(models)
    progress = progress_lines(report)
    corpus = None
    if arguments.corpus_path and any(plan.kind not in ONLINE for plan in plans):
        report(f"reading the corpus {arguments.corpus_path}")
        corpus = Corpus.open(arguments.corpus_path, progress)
        report(f"{len(corpus):,} passages in {arguments.corpus_path}")
    with contextlib.ExitStack() as opened:  # closes what is open when the next thing can't be opened
        backends = []
        for plan in plans:
            backends.append(_open_backend(plan, corpus, arguments, report, progress))
            opened.callback(backends[-1].close)
        backend = backends[0]
        if len(backends) > 1:
            from search_r1.search.hybrid import HybridRetriever

            backend = HybridRetriever(backends, depth=arguments.hybrid_depth)
        if arguments.reranker_model:
            from search_r1.search.rerank import CrossEncoder, RerankRetriever

            report(f"loading the reranker {arguments.reranker_model}")
            batch_size = arguments.reranker_batch_size
            max_length = arguments.reranker_max_length
            encoder = CrossEncoder(arguments.reranker_model, batch_size, max_length, arguments.device)
            backend = RerankRetriever(backend, encoder, arguments.retrieval_topk)
        opened.pop_all()
    return backend


def _open_backend(
    plan: BackendPlan,
    corpus: Corpus | None,
    arguments: argparse.Namespace,
    report: Report,
    progress: Callable[[str, int, int], None],
) -> SearchBackend:
    if plan.kind in ONLINE:
        from search_r1.search.online.online_retriever import OnlineRetriever, online_engine

        engine = online_engine(plan.kind, arguments)
        return OnlineRetriever(engine, arguments.search_rate, arguments.search_timeout)
    assert corpus is not None  # check_backend_arguments asks for it
    path = plan.index_path
    num_threads = arguments.num_threads
    manifest = None
    if path is not None:
        manifest = check_manifest(path, corpus, plan.kind, full=arguments.verify, progress=progress)
    if path is not None and manifest is None:
        report(f"{path} has no manifest: whether it is whole, and of this corpus, can't be told")
    if arguments.verify and manifest is None:
        raise ValueError("--verify: there is no manifest of an index to compare the corpus with")
    report(f"loading {path}" if path else "building the BM25 index in memory")
    if plan.kind == "lucene":
        from search_r1.search.lucene import LuceneRetriever

        assert path is not None
        return LuceneRetriever(corpus, path, num_threads)
    if plan.kind == "bm25":
        from search_r1.search.bm25 import BM25Retriever

        return BM25Retriever(corpus, path, num_threads)

    from search_r1.search.dense.dense_retriever import DenseRetriever
    from search_r1.search.dense.encoder import Encoder

    assert path is not None
    settings = manifest.parameters["encoder"] if manifest is not None else None
    pooling = arguments.pooling_method
    length = arguments.query_max_length
    encoder = Encoder(plan.name, plan.model, arguments.device, pooling, length, index_settings=settings)
    for line in (*encoder.notes, encoder.describe()):
        report(line)
    gpu = arguments.faiss_gpu
    nprobe = arguments.faiss_nprobe
    return DenseRetriever(corpus, path, encoder, num_threads, report, faiss_gpu=gpu, faiss_nprobe=nprobe)


def main(argv: list[str] | None = None, is_installed: bool = False) -> int:
    """Check the server's flags: for retrieval_launch.sh, before anything is installed, and for the preflight.

    Prints the extras of setup.py that the flags need, then "microworld" if the flags name nothing that could
    be served.

    Returns:
        The exit status: 2, with the reason on stderr, for flags that can't work, else 0.
    """
    arguments = build_server_parser().parse_args(argv)
    named = arguments.corpus_path or arguments.index_path or arguments.retriever_name.lower() != "bm25"
    try:
        if not named:
            arguments.corpus_path = __file__  # any file that exists stands for the corpus to come
        check_server_arguments(arguments, is_installed)
        plans = plan_backends(arguments.retriever_name, arguments.index_path, arguments.retriever_model)
    except ValueError as error:
        print(f"error: {printable(error)}", file=sys.stderr)
        return 2
    extras = ["retrieval", *(extras_of(plan.kind, arguments.faiss_gpu) for plan in plans)]
    if arguments.reranker_model:
        extras.append(extras_of("rerank"))
    print(",".join(dict.fromkeys(filter(None, ",".join(extras).split(",")))), "" if named else "microworld")
    return 0


if __name__ == "__main__":
    sys.exit(main())
