"""Downloading wiki-18: whatever breaks on the way, the files are right or not there, and little is lost."""

from __future__ import annotations

import gzip
import io
import json
import random
import tarfile
from pathlib import Path

import pytest
from hub_stand_in import COMMIT, Hub, serve

from data_prep import wiki18
from data_prep.hub import hub_api

LINES = b"".join(
    json.dumps({"id": str(i), "contents": f'"T"\ntext {i}'}).encode() + b"\n" for i in range(9000)
)
PART_AA, PART_AB = random.Random(1).randbytes(300_000), random.Random(2).randbytes(90_001)
CORPUS, E5 = wiki18.ASSETS["corpus"].repository, wiki18.ASSETS["e5"].repository
HNSW, BM25 = wiki18.ASSETS["hnsw"].repository, wiki18.ASSETS["bm25"].repository


def tar_gz(name: str = "data00/wiki_dpr_100w/wiki_dump.jsonl", content: bytes = LINES) -> bytes:
    """As published: a tar archive inside, with folders on the way."""
    memory = io.BytesIO()
    with tarfile.open(fileobj=memory, mode="w:gz", compresslevel=1) as archive:
        folder = tarfile.TarInfo("data00")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        member = tarfile.TarInfo(name)
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    return memory.getvalue()


PACKED = tar_gz()


@pytest.fixture
def hub():
    repositories = {
        CORPUS: {"wiki-18.jsonl.gz": PACKED, "README.md": b"words"},
        E5: {"part_aa": PART_AA, "part_ab": PART_AB, ".gitattributes": b""},
        HNSW: {"part_aa": PART_AB, "part_ab": PART_AA},
        BM25: {
            "bm25/segments_1": b"small",
            "bm25/_0 #1.fdt": PART_AA,
            "bm25/write.lock": b"",
            "README.md": b"x",
        },
    }
    with serve(Hub(repositories)) as running:
        yield running


@pytest.fixture
def fetch(hub, tmp_path, monkeypatch):
    """fetch("corpus", "e5"): the download into tmp_path; returns the lines that were reported."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setitem(wiki18.ASSETS, "corpus", small(wiki18.ASSETS["corpus"]))

    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 10_000)

    def run(*names: str) -> list[str]:
        lines: list[str] = []
        wiki18.prepare(tmp_path, list(names), hub_api(hub.address), "main", lines.append)
        return lines

    return run


def small(asset: wiki18.Asset) -> wiki18.Asset:
    """The asset with the size of the test's corpus: the check of the disk is tested with it."""
    return wiki18.Asset(asset.repository, asset.target, asset.files, len(LINES))


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_everything_arrives_joined_and_unpacked_and_nothing_else_stays(fetch, tmp_path):
    fetch("corpus", "e5", "hnsw", "bm25")
    assert files(tmp_path) == {
        "wiki-18.jsonl": LINES,
        "e5_Flat.index": PART_AA + PART_AB,
        "e5_HNSW64.index": PART_AB + PART_AA,
        "bm25/segments_1": b"small",
        "bm25/_0 #1.fdt": PART_AA,
        "bm25/write.lock": b"",
    }


def test_a_connection_that_breaks_is_taken_up_where_it_was(fetch, hub, tmp_path):
    cuts = iter([100_000, 50_000])
    hub.cut = lambda length: next(cuts, None)
    fetch("e5")
    assert files(tmp_path) == {"e5_Flat.index": PART_AA + PART_AB}
    assert max(hub.ranges) > 0 and hub.num_bytes < 2 * len(PART_AA + PART_AB)


def test_a_wrong_checksum_is_refused_and_what_was_joined_before_is_kept(fetch, hub, tmp_path):
    hub.num_spoiled = 1
    with pytest.raises(ValueError, match=r"part_aa: found .* with checksum \w+, expected .* start again"):
        fetch("e5")
    assert not (tmp_path / "e5_Flat.index").exists()
    fetch("e5")
    assert files(tmp_path) == {"e5_Flat.index": PART_AA + PART_AB}


def test_a_part_that_was_joined_is_not_fetched_again(fetch, hub, tmp_path):
    partial = tmp_path / f"e5_Flat.index.{COMMIT[:12]}.partial"
    partial.write_bytes(PART_AA + PART_AB[:1000])  # killed while the second part was joined
    fetch("e5")
    assert files(tmp_path) == {"e5_Flat.index": PART_AA + PART_AB}
    assert hub.num_bytes == len(PART_AB)


def test_refusals_say_what_to_do(fetch, hub):
    del hub.repositories[E5]["part_ab"]
    with pytest.raises(ValueError, match=r"wiki-18-e5-index has no part_ab; it holds"):
        fetch("e5")
    del hub.repositories[E5]
    with pytest.raises(ValueError, match="wiki-18-e5-index can't be had from the hub .status 404"):
        fetch("e5")
    hub.token = "secret"
    with pytest.raises(ValueError, match=r"status 401: .*set HF_TOKEN"):
        fetch("corpus")


@pytest.mark.parametrize(
    ("packed", "message"),
    [
        (gzip.compress(b"no corpus\n"), "is no corpus; its first line begins with b'no corpus"),
        (tar_gz("a/readme.txt"), "holds no .jsonl file"),
        (PACKED[:-5000], "can't be unpacked"),
        (PACKED[:-8] + b"00000000", "can't be unpacked .CRC check failed"),
    ],
    ids=["no corpus", "no file", "cut", "checksum"],
)
def test_a_broken_archive_leaves_no_corpus(tmp_path, packed, message):
    (tmp_path / "a.gz").write_bytes(packed)
    with pytest.raises(ValueError, match=message):
        wiki18.unpack(tmp_path / "a.gz", tmp_path / "a", lambda line: None)
    assert list(files(tmp_path)) == ["a.gz"]


@pytest.mark.parametrize(
    ("options", "endpoint", "message"),
    [
        (["--what", "corpus,e6"], "http://x", "--what: found 'corpus,e6', expected some of corpus, e5"),
        (["--what", "e5"], "hub", "HF_ENDPOINT: found 'hub', expected an address"),
    ],
)
def test_mistakes_are_one_line(tmp_path, capsys, monkeypatch, options, endpoint, message):
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    with pytest.raises(SystemExit) as ended:
        wiki18.main(["--save_path", str(tmp_path), *options])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and message in error and error.count("\n") == 1
