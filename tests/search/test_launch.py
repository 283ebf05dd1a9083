"""Flags to backends: Search-R1's command lines, plain errors before anything loads, what an index holds."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest

from search_r1.search import backend_plan, launch
from search_r1.search.backend_plan import BackendPlan, plan_backends
from search_r1.search.corpus import Corpus
from search_r1.search.launch import add_backend_arguments, check_backend_arguments, open_retriever
from search_r1.search.manifest import Manifest, write_manifest

DOCUMENTS = [
    {"id": "a", "contents": '"Amber Harbor"\nA film by Tomas Weld.'},
    {"id": "b", "contents": '"Tomas Weld"\nA director from Orlen.'},
    {"id": "c", "contents": '"Orlen"\nA town on a river.'},
]


def parse(*flags: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--topk", type=int, default=3)
    add_backend_arguments(parser)
    return parser.parse_args([str(flag) for flag in flags])


def check(*flags: object) -> None:
    check_backend_arguments(parse(*flags))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A corpus, and one of each thing that --index_path may point at."""
    folder = tmp_path_factory.mktemp("launch")
    lines = [json.dumps(document) + "\n" for document in DOCUMENTS]
    (folder / "corpus.jsonl").write_text("".join(lines))
    corpus = Corpus.open(folder / "corpus.jsonl").fingerprint()
    for backend in ("bm25", "exact", "lucene"):
        (folder / f"ours_{backend}").mkdir()
        parameters = {"encoder": {"model": "some/encoder"}} if backend == "exact" else {}
        write_manifest(folder / f"ours_{backend}", Manifest(backend, corpus, parameters, {}))
    (folder / "wiki-18-bm25").mkdir()
    (folder / "wiki-18-bm25" / "segments_2").touch()
    (folder / "e5_Flat.index").write_bytes(b"IxFI" + bytes(40))
    (folder / "HNSW.index").write_bytes(b"IHNf" + bytes(40))
    (folder / "pointer.index").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    (folder / "notes").mkdir()
    (folder / "notes" / "a.txt").touch()
    (folder / "e5_exact.building").mkdir()
    (folder / "no_model").mkdir()
    return folder


def test_the_number_of_reranked_documents_is_the_servers_topk():
    assert parse("--reranking_topk", 7).topk == 7
    assert parse("--topk", 4).topk == 4
    assert parse().topk == 3


@pytest.mark.parametrize(
    ("name", "index", "kind", "model"),
    [
        ("bm25", "ours_bm25", "bm25", None),
        ("bm25", "wiki-18-bm25", "lucene", None),
        ("bm25", "ours_lucene", "lucene", None),
        ("LUCENE", "wiki-18-bm25", "lucene", None),
        ("e5", "ours_exact", "exact", None),
        ("anything", "ours_exact", "exact", None),
        ("e5", "e5_Flat.index", "faiss", "intfloat/e5-base-v2"),
    ],
)
def test_what_the_index_path_holds_decides_the_backend(folder, name, index, kind, model):
    expected = BackendPlan(name.lower(), kind, folder / index, model)
    assert plan_backends(name, str(folder / index), None) == [expected]


def test_hybrid_takes_indexes_and_models_in_the_order_of_the_names(folder):
    first = folder / "ours_bm25"
    second = folder / "e5_Flat.index"
    assert plan_backends("bm25+e5", f"{first},{second}", "my/model") == [
        BackendPlan("bm25", "bm25", first),
        BackendPlan("e5", "faiss", second, "my/model"),
    ]
    assert plan_backends("e5+bm25", f"{second},", None)[1] == BackendPlan("bm25", "bm25")
    exact = folder / "ours_exact"
    both = plan_backends("e5+bge", f"{second},{exact}", "one,two")
    assert [plan.model for plan in both] == ["one", "two"]
    assert [plan.kind for plan in plan_backends("bm25+serpapi", str(first), None)] == ["bm25", "serpapi"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "--corpus_path is missing"),
        ("--corpus_path {}/nowhere.jsonl", "--corpus_path: there is no file .*nowhere.jsonl"),
        ("--retriever_name bm52 --corpus_path {}/corpus.jsonl", "found 'bm52'; did you mean 'bm25'"),
        ("--retriever_name lucen", "did you mean 'lucene'"),
        ("--retriever_name serp_api", "did you mean 'serpapi'"),
        ("--retriever_name contreiver", "did you mean 'contriever'"),
        ("--retriever_name e5", "needs --index_path"),
        ("--retriever_name bm25+", "expected a name, or two with"),
        ("--retriever_name bm25+bm25", "a name stands twice"),
        ("--retriever_name lucene", "--index_path is missing: the folder of the Lucene index"),
        ("--retriever_name lucene --index_path {}/ours_bm25", "holds a BM25 index, .* needs a Lucene"),
        ("--retriever_name lucene --index_path {}/none", "none does not exist, .* needs a Lucene"),
        ("--retriever_name bm25 --index_path {}/e5_Flat.index", "holds a FAISS index, .* needs one of BM25"),
        ("--retriever_name bm25 --index_path {}/ours_exact", "holds a dense index"),
        ("--retriever_name bm25 --index_path {}/none", "none does not exist, .* needs one of BM25"),
        ("--retriever_name bm25 --index_path {}/notes", "is no index that this server knows"),
        ("--retriever_name e5 --index_path {}/ours_bm25", "holds a BM25 index, e5 needs a dense index"),
        ("--retriever_name e5 --index_path {}/wiki-18-bm25", "holds a Lucene index, e5 needs a dense"),
        ("--retriever_name e5 --index_path {}/pointer.index", "is a git-lfs pointer"),
        ("--retriever_name e5 --index_path {}/e5_exact", "the index builder was stopped; start it again"),
        ("--retriever_name bge --index_path {}/e5_Flat.index", "--retriever_model is missing"),
        (
            "--retriever_name e5 --index_path {}/ours_exact --retriever_model {}/no_model",
            "--retriever_model: found .*no_model, which is no folder of a Hugging Face model",
        ),
        ("--reranker_model ./nowhere --corpus_path {}/corpus.jsonl", "--reranker_model: found ./nowhere"),
        ("--retriever_name bm25+e5 --index_path {}/ours_bm25", "--index_path: found 1, expected 2"),
        ("--num_threads 0", "--num_threads: found 0, expected at least 1"),
        ("--retrieval_topk 0", "--retrieval_topk: found 0, expected at least 1"),
        (
            "--retriever_name e5 --index_path {}/ours_exact --faiss_gpu --corpus_path {}/corpus.jsonl",
            "--faiss_gpu: the index is not a FAISS file",
        ),
        (
            "--retriever_name e5 --index_path {}/e5_Flat.index --faiss_gpu --corpus_path {}/corpus.jsonl",
            r"--faiss_gpu: (this FAISS was built without GPUs|FAISS sees no GPU|FAISS can't be loaded)",
        ),
        (
            "--retriever_name e5 --index_path {}/HNSW.index --faiss_gpu --corpus_path {}/corpus.jsonl",
            r"--faiss_gpu: found .*HNSW.index \(HNSW, 0 x 0\): FAISS has no HNSW for GPUs",
        ),
        ("--faiss_nprobe 8 --corpus_path {}/corpus.jsonl", "--faiss_nprobe is for FAISS"),
    ],
)
def test_flags_that_can_not_work_are_said_before_anything_loads(folder, flags, message):
    with pytest.raises(ValueError, match=message):
        check(*flags.replace("{}", str(folder)).split())


def test_a_missing_package_is_said_with_the_command_to_type(folder, monkeypatch):
    monkeypatch.setitem(backend_plan.EXTRAS, "bm25", ("retrieval", ("numba", "no_such_package")))
    words = r'bm25 needs the package no_such_package.*: pip install -c constraints.txt -e "\.\[retrieval\]"'
    with pytest.raises(ValueError, match=words):
        check("--corpus_path", folder / "corpus.jsonl")


def test_online_search_needs_no_corpus_but_a_key(monkeypatch):
    monkeypatch.delenv("SERPAPI_API_KEY", raising=False)
    with pytest.raises(ValueError, match="the environment lacks SERPAPI_API_KEY"):
        check("--retriever_name", "serpapi")
    monkeypatch.setenv("SERPAPI_API_KEY", "secret")
    check("--retriever_name", "serpapi")


def test_a_reranker_stands_on_top_of_a_hybrid(folder, monkeypatch, tmp_path):
    class Named:
        def __init__(self, name: str) -> None:
            self.name = name
            self.num_documents = 3

        def close(self) -> None:
            pass

    monkeypatch.setattr(launch, "_open_backend", lambda plan, *_: Named(plan.name))
    from tiny_cross_encoder import save_model  # it imports torch

    model = save_model(tmp_path / "model", 1)
    retriever = open_retriever(
        parse(
            *["--corpus_path", folder / "corpus.jsonl", "--retriever_name", "bm25+e5"],
            *["--index_path", f",{folder / 'ours_exact'}", "--retriever_model", model],
            *["--reranker_model", model],
        )
    )
    assert retriever.name == "bm25+e5+rerank"


def test_the_flags_do_not_import_heavy_packages():
    import subprocess

    script = """
import sys, argparse
from search_r1.search.launch import add_backend_arguments
add_backend_arguments(argparse.ArgumentParser())
print(sorted({"torch", "faiss", "numba", "jnius", "transformers", "ray"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
