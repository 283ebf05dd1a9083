"""Downloading wiki-18: files are joined and unpacked, or not there."""

from __future__ import annotations

import io
import json
import random
import tarfile
from pathlib import Path

import pytest
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

from data_prep import wiki18

LINES = b"".join(
    json.dumps({"id": str(i), "contents": f'"T"\ntext {i}'}).encode() + b"\n" for i in range(900)
)
PART_AA = random.Random(1).randbytes(30_000)
PART_AB = random.Random(2).randbytes(9_001)


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
def hub(monkeypatch) -> dict[tuple[str, str], bytes]:
    """(repository, path) -> content; huggingface_hub's functions give from it."""
    content = {("PeterJinGo/wiki-18-corpus", "wiki-18.jsonl.gz"): PACKED}
    for name in ("e5-index", "e5-index-HNSW64"):
        content[f"PeterJinGo/wiki-18-{name}", "part_aa"] = PART_AA
        content[f"PeterJinGo/wiki-18-{name}", "part_ab"] = PART_AB
    content["PeterJinGo/wiki-18-bm25-index", "bm25/segments_1"] = b"small"

    def download(repository: str, path: str, *, repo_type: str, local_dir: Path) -> str:
        if not content:
            raise LocalEntryNotFoundError("no connection to https://x/y?Signature=secret\nand no such file")
        if (repository, path) not in content:
            raise EntryNotFoundError("404")
        target = Path(local_dir) / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content[repository, path])
        return str(target)

    def listing(repository: str, *, repo_type: str) -> list[str]:
        if not content:
            raise RuntimeError("no connection to https://x/y?Signature=secret")
        return ["README.md", *(path for name, path in content if name == repository)]

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr("huggingface_hub.list_repo_files", listing)
    return content


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_everything_arrives_joined_and_unpacked_and_nothing_else_stays(hub, tmp_path):
    expected = {
        "wiki-18.jsonl": LINES,
        "e5_Flat.index": PART_AA + PART_AB,
        "e5_HNSW64.index": PART_AA + PART_AB,
        "bm25/segments_1": b"small",
    }
    killed_while_joining = tmp_path / f"e5_Flat.index.unfinished.{len(PART_AA)}"
    killed_while_joining.write_bytes(PART_AA + PART_AB[:5])
    del hub["PeterJinGo/wiki-18-e5-index", "part_aa"]  # what is there is not fetched again
    assert wiki18.main(["--save_path", str(tmp_path), "--what", "corpus,e5,hnsw,bm25"]) == 0
    assert files(tmp_path) == expected
    del hub["PeterJinGo/wiki-18-corpus", "wiki-18.jsonl.gz"]
    assert wiki18.main(["--save_path", str(tmp_path), "--what", "corpus"]) == 0


@pytest.mark.parametrize(
    ("packed", "message"),
    [
        (tar_gz("a/readme.txt"), "holds no .jsonl file"),
        (PACKED[:-500], "can't be unpacked"),
        (PACKED[:-8] + b"00000000", "can't be unpacked (CRC check failed"),
    ],
    ids=["no file", "cut", "checksum"],
)
def test_a_broken_archive_leaves_no_corpus(hub, tmp_path, capsys, packed, message):
    hub["PeterJinGo/wiki-18-corpus", "wiki-18.jsonl.gz"] = packed
    assert wiki18.main(["--save_path", str(tmp_path), "--what", "corpus"]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "wiki-18.jsonl").exists()


def test_mistakes_and_a_hub_that_is_away_are_one_line(hub, tmp_path, capsys):
    for what, message in (
        ("corpus,e6", "--what: found 'corpus,e6', expected some of corpus, e5"),
        ("e5", "wiki-18-e5-index has no part_ab"),
        (
            "e5",
            "part_aa of PeterJinGo/wiki-18-e5-index can't be had from the hub (no connection to https://x/y",
        ),
        ("bm25", "bm25/ of PeterJinGo/wiki-18-bm25-index can't be had from the hub (no connection to"),
    ):
        assert wiki18.main(["--save_path", str(tmp_path), "--what", what]) == 2
        error = capsys.readouterr().err
        assert message in error and "secret" not in error and error.count("\n") == 1
        if "part_ab" in message:
            hub.clear()
        hub.pop(("PeterJinGo/wiki-18-e5-index", "part_ab"), None)
