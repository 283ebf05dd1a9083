"""The corpus: the right bytes for each row, and never a line that would break a reply."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import tarfile
from pathlib import Path

import pytest

from search_r1.search import corpus as corpus_module
from search_r1.search import corpus_files
from search_r1.search.corpus import Corpus, file_identity
from search_r1.search.corpus_files import sidecar_path

LINES = [
    '{"id": "0", "contents": "\\"Rome\\"\\nA city."}',
    '{"contents": "no id", "more": {"contents": [1, 2.50, null]}}',
    '{"contents": "ümlaut 東京 \U0001f600", "id": 2}',
]


@pytest.fixture
def write(tmp_path):
    def write_file(data: bytes | str, name: str = "corpus.jsonl") -> Path:
        path = tmp_path / name
        path.write_bytes(data.encode() if isinstance(data, str) else data)
        return path

    return write_file


@pytest.fixture
def unchecked(monkeypatch):
    """Every file counts as too large to be checked when it is opened."""
    monkeypatch.setattr(corpus_module, "CHECK_BYTES", -1)


def texts(corpus: Corpus) -> list[bytes]:
    return [document.json for document in corpus.rows(range(len(corpus)))]


def test_a_row_is_served_as_the_bytes_of_its_line(write):
    corpus = Corpus.open(write("\n".join(LINES) + "\n"))
    assert len(corpus) == 3
    assert [d.json.decode() for d in corpus.rows([2, 0, 2])] == [LINES[2], LINES[0], LINES[2]]
    assert [d.row for d in corpus.rows([2, 0, 2])] == [2, 0, 2]
    assert list(corpus.iter_contents()) == [json.loads(line)["contents"] for line in LINES]
    assert corpus.rows([]) == []


ONE = b'{"contents": "one"}'
TWO = b'{"contents": "two"}'


@pytest.mark.parametrize(
    "data",
    [
        ONE + b"\n" + TWO + b"\n",
        ONE + b"\n" + TWO,
        ONE + b"\r\n" + TWO + b"\r\n",
        ONE + b"\r\n" + TWO + b"\r",
        b"\n\n" + ONE + b"\n\n\n" + TWO + b"\n\n",
        b" \t\r\n" + ONE + b"\n" + b" " * 10_000 + b"\n  " + TWO + b"  \n \t ",
        b"\xef\xbb\xbf" + ONE + b"\n" + TWO,
        b"\xef\xbb\xbf\r\n" + ONE + b"\n" + TWO,
    ],
    ids=["plain", "no last newline", "CRLF", "CR at the end", "blank lines", "spaces", "BOM", "BOM, blank"],
)
@pytest.mark.parametrize("block", [1, 7, 20, 1 << 20])
def test_line_ends_blank_lines_and_a_byte_order_mark_belong_to_no_row(write, monkeypatch, data, block):
    monkeypatch.setattr(corpus_files, "BLOCK_BYTES", block)
    corpus = Corpus.open(write(data))
    assert texts(corpus) == [ONE, TWO]
    assert list(corpus.iter_contents()) == ["one", "two"]


BROKEN = [
    (b'{"id": 1, "contents": "x"', "not valid JSON"),
    (b'{"contents": "x"} {"contents": "y"}', "not valid JSON"),
    (b'{"contents": "x"}\r{"contents": "y"}', "not valid JSON"),
    (b"\x0c", "not valid JSON"),
    (b"[1]", "found a JSON list"),
    (b'"contents"', "found a JSON str"),
    (b'{"id": 1, "text": "x"}', "found 'id', 'text'"),
    (b'{"contents": null}', "found 'contents'"),
    (b'{"contents": ["x"]}', "found 'contents'"),
    (b"{}", "found no fields"),
    (b'{"contents": "\xff"}', "not valid JSON"),
    (b'{"contents": "\xed\xa0\x80"}', "not valid JSON"),
    (b'{"contents": "x", "score": NaN}', "not valid JSON"),
    (b'{"contents": "x", "score": 1e999}', "infinity"),
    (b'{"contents": "cut \\ud83d"}', "surrogate"),
    (b'{"contents": "x\x00"}', "control character"),
    (b'\xef\xbb\xbf{"contents": "x"}', "byte order mark inside the file"),
    (b'{"contents": "x", "deep": ' + b"[" * 5000 + b"]" * 5000 + b"}", "not valid JSON"),
]


@pytest.mark.parametrize("line, problem", BROKEN, ids=[repr(line[:40]) for line, _ in BROKEN])
def test_a_broken_line_is_named_when_a_small_file_is_opened(write, line, problem):
    with pytest.raises(ValueError, match=f"corpus.jsonl, line 3: .*{problem}"):
        Corpus.open(write(b'{"contents": "fine"}\n\n' + line + b"\n"))


@pytest.mark.parametrize("line, problem", BROKEN, ids=[repr(line[:40]) for line, _ in BROKEN])
def test_a_broken_line_of_a_large_file_is_never_served(write, unchecked, line, problem):
    corpus = Corpus.open(write(b'{"contents": "fine"}\n' + line + b'\n{"contents": "last"}\n'))
    assert texts_of(corpus, [0, 2]) == ["fine", "last"]
    for _ in range(2):
        with pytest.raises(ValueError, match=f"corpus.jsonl, line 2: .*{problem}"):
            corpus.rows([0, 1])
    with pytest.raises(ValueError, match=f"line 2: .*{problem}"):
        list(corpus.iter_contents())


def texts_of(corpus: Corpus, rows: list[int]) -> list[str]:
    return [document.contents for document in corpus.rows(rows)]


def test_a_missing_an_empty_and_an_unreadable_corpus_are_refused(write, tmp_path):
    with pytest.raises(ValueError, match="no file .*nothing.jsonl"):
        Corpus.open(tmp_path / "nothing.jsonl")
    with pytest.raises(ValueError, match="no file"):
        Corpus.open(tmp_path)
    for data in ("", "\n", " \n\t\r\n ", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n"):
        with pytest.raises(ValueError, match="no documents"):
            Corpus.open(write(data))


# Offsets that are kept


def test_the_offsets_are_kept_and_the_file_is_not_scanned_again(write, monkeypatch):
    path = write("\n\n".join(LINES))
    first = Corpus.open(path)
    monkeypatch.setattr(corpus_files, "_scan", lambda *_: pytest.fail("scanned again"))
    second = Corpus.open(path)
    assert texts(second) == texts(first)
    assert second.num_blank_lines == first.num_blank_lines == 2
    assert sorted(p.name for p in path.parent.iterdir()) == ["corpus.jsonl", "corpus.jsonl.offsets.npy"]


def test_kept_offsets_of_another_file_are_not_used(write):
    path = write(ONE + b"\n" + TWO + b"\n")
    Corpus.open(path).close()
    write(b'{"contents": "longer"}\n' + ONE + b"\n")
    assert texts_of(Corpus.open(path), [0, 1]) == ["longer", "one"]
    kept = sidecar_path(path).read_bytes()
    write(b'{"contents": "l"}\n{"contents": "one 56"}\n')  # the same size
    later = path.stat().st_mtime_ns + 1_000_000
    os.utime(path, ns=(later, later))
    assert texts_of(Corpus.open(path), [0, 1]) == ["l", "one 56"]
    assert sidecar_path(path).read_bytes() != kept


def test_a_file_that_is_changed_while_in_use_gives_an_error_and_no_wrong_text(write):
    path = write(ONE + b"\n" + TWO + b"\n")
    corpus = Corpus.open(path)
    with path.open("r+b") as file:
        file.write(b" " * 10 + ONE)
    with pytest.raises(ValueError, match="changed while in use"):
        corpus.rows([0])
    with path.open("r+b") as file:
        file.truncate(25)
    with pytest.raises(ValueError, match="cut short"):
        corpus.rows([1])


# Packed files


def test_a_packed_corpus_is_unpacked_once(write, monkeypatch):
    packed = write(gzip.compress("\n".join(LINES).encode()), "corpus.jsonl.gz")
    corpus = Corpus.open(packed)
    assert corpus.path == packed.with_suffix("")
    assert [t.decode() for t in texts(corpus)] == LINES
    monkeypatch.setattr(gzip.GzipFile, "read", lambda *_: pytest.fail("unpacked again"))
    assert texts(Corpus.open(packed)) == texts(corpus)
    assert not list(packed.parent.glob("*.partial"))


def test_a_tar_archive_inside_the_gzip_file_is_named_and_nothing_is_left(write, tmp_path):
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        member = tarfile.TarInfo("wiki_dump.jsonl")
        member.size = len(ONE)
        tar.addfile(member, io.BytesIO(ONE))
    packed = write(gzip.compress(archive.getvalue()), "wiki-18.jsonl.gz")
    with pytest.raises(ValueError, match="holds a tar archive.*data_prep.wiki18"):
        Corpus.open(packed)
    assert [path.name for path in tmp_path.iterdir()] == ["wiki-18.jsonl.gz"]


@pytest.mark.parametrize(
    "content, name, reason",
    [
        (lambda text: bz2.compress(text), "corpus.jsonl", "Found bzip2 data"),
        (lambda text: gzip.compress(text), "corpus.jsonl", "Found gzip data"),
        (lambda text: lzma.compress(text), "corpus.jsonl.xz", "Found xz data"),
        (lambda text: text.decode().encode("utf-16"), "corpus.jsonl", "Found UTF-16 text"),
        (lambda text: text.decode().encode("utf-16-le"), "corpus.jsonl", "Found UTF-16 text"),
        (lambda text: b"[\n" + text.replace(b"\n", b",\n") + b"]", "corpus.jsonl", "Found a JSON array"),
        (
            lambda text: b'{"contents": "caf\xe9"}',
            "corpus.jsonl",
            "line 1: not valid JSON: the byte 0xe9 at column 18 is no UTF-8",
        ),
        (
            lambda text: b'{"id": "2", "contents": 5}',
            "corpus.jsonl",
            "line 1: found 'contents' of the type int",
        ),
    ],
)
def test_a_file_of_another_format_is_named(write, content, name, reason):
    with pytest.raises(ValueError, match=reason):
        Corpus.open(write(content("\n".join(LINES).encode()), name))


def test_a_bz2_file_is_unpacked_once(write):
    packed = write(bz2.compress("\n".join(LINES).encode()), "corpus.jsonl.bz2")
    assert len(Corpus.open(packed)) == len(Corpus.open(packed)) == len(LINES)
    assert file_identity(packed) == file_identity(packed.with_suffix(""))
    broken = write(bz2.compress(b"x" * 999)[:-9], "broken.jsonl.bz2")
    with pytest.raises(ValueError, match="not a whole bzip2 file"):
        Corpus.open(broken)
