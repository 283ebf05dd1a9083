"""Downloading wiki-18: whatever breaks on the way, the files are right or not there, and little is lost."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tarfile
import time
from collections import namedtuple
from pathlib import Path

import pytest
from hub_stand_in import Hub, serve

from data_prep import wiki18
from data_prep.download import MAX_FAILURES, Downloader, hub_client

ROOT = Path(__file__).parents[2]
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
def report() -> list[str]:
    return []


@pytest.fixture
def pauses() -> list[float]:
    return []


@pytest.fixture
def fetch(hub, tmp_path, report, pauses, monkeypatch):
    """fetch("corpus", "e5"): the download into tmp_path, without waiting."""
    monkeypatch.setitem(wiki18.ASSETS, "corpus", small(wiki18.ASSETS["corpus"]))

    def run(*names: str) -> None:
        with hub_client() as client:
            downloader = Downloader(client, report.append, pauses.append)
            wiki18.prepare(tmp_path, list(names), hub.address, "main", downloader)

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


def test_what_is_there_is_not_fetched_again(fetch, hub, tmp_path):
    fetch("corpus", "e5")
    sent = hub.num_bytes
    fetch("corpus", "e5")
    assert hub.num_bytes == sent


def test_a_connection_that_breaks_anywhere_costs_nothing_twice(fetch, hub, tmp_path, report):
    cuts = random.Random(3)
    hub.cut = lambda length: cuts.randrange(length + 1)  # 0: before the first byte; length: not at all
    fetch("corpus", "e5")
    assert files(tmp_path) == {"wiki-18.jsonl": LINES, "e5_Flat.index": PART_AA + PART_AB}
    assert len(hub.ranges) > 6 and max(hub.ranges) > 0
    assert hub.num_bytes == len(PACKED) + len(PART_AA) + len(PART_AB)
    assert any("trying again" in line for line in report)


def test_a_server_that_knows_no_ranges_starts_over(fetch, hub, tmp_path):
    cuts = iter([200_000, 299_999, 10])
    hub.knows_ranges = False
    hub.cut = lambda length: next(cuts, None)
    fetch("e5")
    assert files(tmp_path) == {"e5_Flat.index": PART_AA + PART_AB}


def test_a_server_that_never_gets_further_is_given_up(fetch, hub):
    hub.knows_ranges = False
    hub.cut = lambda length: 200_000
    with pytest.raises(ValueError, match=f"part_aa: failed {MAX_FAILURES} times in a row"):
        fetch("e5")


def test_busy_answers_are_waited_for_as_long_as_asked(fetch, hub, tmp_path, pauses):
    hub.answers = [503, 429, 500]
    fetch("e5")
    assert files(tmp_path) == {"e5_Flat.index": PART_AA + PART_AB}
    assert len(pauses) == 3 and all(3 <= seconds <= 4 for seconds in pauses)


def test_a_server_that_stays_away_is_given_up_and_what_is_there_is_kept(fetch, hub, tmp_path, pauses):
    hub.cut = lambda length: 100_000 if length == len(PART_AA) else 0
    with pytest.raises(ValueError, match=f"part_aa: failed {MAX_FAILURES} times in a row"):
        fetch("e5")
    assert (tmp_path / "e5_Flat.index.download").stat().st_size == 100_000
    assert len(pauses) == MAX_FAILURES - 1
    assert all(min(60, 2**n) / 2 <= pause <= min(60, 2**n) for n, pause in enumerate(pauses, 1))
    hub.cut = lambda length: None
    fetch("e5")
    assert hub.ranges[-2:] == [100_000, 0]
    assert files(tmp_path) == {"e5_Flat.index": PART_AA + PART_AB}


def test_a_wrong_checksum_is_fetched_again_once_and_then_refused(fetch, hub, tmp_path, report):
    hub.num_spoiled = 1
    fetch("e5")
    assert files(tmp_path) == {"e5_Flat.index": PART_AA + PART_AB}
    assert any("part_aa: wrong checksum, found" in line for line in report)
    hub.num_spoiled = 2
    with pytest.raises(ValueError, match=r"wiki-18.jsonl.gz: wrong checksum, found \w+, expected \w+, twice"):
        fetch("corpus")
    assert not (tmp_path / "wiki-18.jsonl").exists()


def test_small_files_are_checked_too(fetch, hub, tmp_path):
    hub.repositories[BM25] = {"bm25/segments_1": b"small"}
    hub.num_spoiled = 2
    with pytest.raises(ValueError, match="segments_1: wrong checksum"):
        fetch("bm25")


def test_a_file_that_changed_on_the_hub_is_not_mixed_with_its_old_half(fetch, hub, tmp_path, report):
    hub.cut = lambda length: 0 if length < len(PART_AA) else 100_000
    with pytest.raises(ValueError, match="times in a row"):
        fetch("e5")
    hub.cut = lambda length: None
    hub.repositories[E5]["part_aa"] = PART_AA[::-1]
    fetch("e5")
    assert files(tmp_path) == {"e5_Flat.index": PART_AA[::-1] + PART_AB}
    assert not any("wrong checksum" in line for line in report)


def test_refusals_say_what_to_do(fetch, hub):
    del hub.repositories[E5]["part_ab"]
    with pytest.raises(ValueError, match=r"wiki-18-e5-index has no part_ab; it holds"):
        fetch("e5")
    del hub.repositories[E5]
    with pytest.raises(ValueError, match="status 404, there is no such file or repository"):
        fetch("e5")
    hub.token = "secret"
    with pytest.raises(ValueError, match=r"status 401, .*set HF_TOKEN"):
        fetch("corpus")
    hub.answers, hub.token = [404], None
    with pytest.raises(ValueError, match="wiki-18.jsonl.gz: status 404"):  # without the Signature behind it
        fetch("corpus")


def test_the_token_goes_to_the_hub_and_not_to_its_storage(fetch, hub, tmp_path, monkeypatch):
    hub.token = "secret"
    monkeypatch.setenv("HF_TOKEN", "secret")
    fetch("e5")
    assert (tmp_path / "e5_Flat.index").exists() and hub.leaked == []


def test_a_proxy_of_the_environment_is_used(fetch, hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", hub.address)
    monkeypatch.setenv("NO_PROXY", "")
    hub.address = hub.storage = "http://hub.invalid"  # only the proxy knows it
    fetch("e5")
    assert files(tmp_path) == {"e5_Flat.index": PART_AA + PART_AB}


def test_too_little_room_is_said_before_anything_is_fetched(fetch, hub, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    needed = len(PACKED) + len(LINES)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage(0, 0, needed - 1))
    with pytest.raises(ValueError, match=r"GB are needed and .* GB are free"):
        fetch("corpus")
    assert hub.num_bytes == 0
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage(0, 0, needed))
    fetch("corpus")
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage(0, 0, 0))
    fetch("corpus")  # nothing is missing: nothing is needed


def test_a_plain_gzip_file_is_unpacked_too(fetch, hub, tmp_path):
    hub.repositories[CORPUS]["wiki-18.jsonl.gz"] = gzip.compress(LINES, 1)
    fetch("corpus")
    assert files(tmp_path) == {"wiki-18.jsonl": LINES}


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
        wiki18.unpack(tmp_path / "a.gz", tmp_path / "a", len(LINES), lambda line: None)
    assert list(files(tmp_path)) == ["a.gz"]


def test_killed_while_unpacking_nothing_is_downloaded_again(fetch, hub, tmp_path):
    (tmp_path / "wiki-18.jsonl.gz").write_bytes(PACKED)
    (tmp_path / "wiki-18.jsonl.unpacking").write_bytes(LINES[:1000])
    fetch("corpus")
    assert files(tmp_path) == {"wiki-18.jsonl": LINES} and hub.num_bytes == 0
    (tmp_path / "wiki-18.jsonl.gz").write_bytes(PACKED)  # killed before it was removed
    fetch("corpus")
    assert files(tmp_path) == {"wiki-18.jsonl": LINES}


def start(hub: Hub, folder: Path, what: str, max_bytes: int | None = None) -> subprocess.Popen[str]:
    """The program itself; with `max_bytes` no file may grow beyond that, as on a full disk."""

    def limit() -> None:
        if max_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, max_bytes))

    command = [sys.executable, "-m", "data_prep.wiki18", "--save_path", str(folder), "--what", what]
    environment = os.environ | {"HF_ENDPOINT": hub.address, "NO_PROXY": "127.0.0.1"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, preexec_fn=limit,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.mark.slow
def test_a_disk_that_fills_up_keeps_what_is_there(hub, tmp_path):
    full = start(hub, tmp_path, "e5", max_bytes=250_000)
    _, error = full.communicate(timeout=60)
    assert full.returncode == 2 and "can't be written" in error and error.count("\n") == 1
    kept = (tmp_path / "e5_Flat.index.download").stat().st_size
    assert 0 < kept <= 250_000
    again = start(hub, tmp_path, "e5")
    assert again.wait(timeout=60) == 0
    assert hub.ranges[1] == kept
    assert files(tmp_path) == {"e5_Flat.index": PART_AA + PART_AB}


@pytest.mark.slow
def test_killed_in_the_middle_and_started_again(hub, tmp_path):
    hub.bytes_per_second = 200_000
    running = start(hub, tmp_path, "e5")
    partial = tmp_path / "e5_Flat.index.download"
    deadline = time.monotonic() + 30
    while not (partial.exists() and partial.stat().st_size > 50_000) and time.monotonic() < deadline:
        time.sleep(0.01)
    hub.bytes_per_second = 1_000  # so that it does not end while the second one starts
    second = start(hub, tmp_path, "e5")
    assert second.wait(timeout=30) == 2
    assert "another process is writing to it" in second.communicate()[1]
    running.send_signal(signal.SIGKILL)
    running.communicate()
    hub.bytes_per_second = None
    kept = partial.stat().st_size
    again = start(hub, tmp_path, "e5")
    out, _ = again.communicate(timeout=60)
    assert again.returncode == 0 and "part_aa: goes on at" in out
    assert hub.ranges[-2:] == [kept, 0] and kept > 50_000
    assert files(tmp_path) == {"e5_Flat.index": PART_AA + PART_AB}


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


def test_a_reply_that_is_no_listing_is_named(fetch, hub):
    hub.listing = lambda repository: b"<html>please log in</html>"
    with pytest.raises(ValueError, match="the reply is not the hub's list of files"):
        fetch("e5")
