"""Find where the lines of a corpus file begin, and unpack .jsonl.gz and .jsonl.bz2 files.

    corpus.jsonl.gz -> unpack -> corpus.jsonl -> find_rows -> offsets, kept in <corpus>.offsets.npy

A row is a line that isn't blank. Only "\\n" ends a line (U+2028 and a lone "\\r" don't), and the last line
may lack it. A byte order mark at the beginning of the file belongs to no row. Nothing is decoded here.
"""

from __future__ import annotations

import bz2
import contextlib
import fcntl
import gzip
import os
import zlib
from pathlib import Path

import numpy as np

from search_r1.search.long_work import Progress

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
PACKED_SUFFIXES = (".gz", ".bz2")  # of corpora that are unpacked
SIDECAR_FORMAT = 0x5352_4F46_0002  # "SROF", version 2
BLOCK_BYTES = 16 * 2**20
# The first bytes of packed files, their names, and the commands that unpack them.
_PACKED = (
    (b"\x1f\x8b", "gzip", "gzip -dc"),
    (b"BZh", "bzip2", "bzip2 -dc"),
    (b"\xfd7zXZ", "xz", "xz -dc"),
    (b"\x28\xb5\x2f\xfd", "zstd", "zstd -dc"),
    (b"PK\x03\x04", "zip", "unzip -p"),
)
_WIDE = (
    (b"\xff\xfe\x00\x00", "UTF-32"),
    (b"\x00\x00\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
)
NEWLINE = 10
BRACE = 123


def sidecar_path(corpus: Path) -> Path:
    """Return the path of the file that keeps the offsets of `corpus`, beside it."""
    return corpus.with_name(corpus.name + ".offsets.npy")


def find_rows(path: Path, progress: Progress | None = None) -> tuple[np.ndarray, int]:
    """Return where each row of a corpus begins, and how many lines are blank.

    The offsets are mapped from the kept file if that is for this size and time. Else the file is scanned, and
    the offsets are kept if the folder can be written to.

    Returns:
        Offsets uint64 [N + 1]: where each row begins in the file and, last, the file's size. They are
        memory-mapped if they were kept. The second value is the number of blank lines. If it is 0, row n is
        line n + 1.

    Raises:
        ValueError: For a file without rows, and for one that changes during the scan.
    """
    old_stat = path.stat()
    if (kept_rows := _read_sidecar(path, old_stat)) is not None:
        return kept_rows
    starts, num_blank = _scan(path, old_stat.st_size, progress)
    if len(starts) < 2:
        raise ValueError(f"{path}: the corpus has no documents")
    new_stat = path.stat()
    if (new_stat.st_size, new_stat.st_mtime_ns) != (old_stat.st_size, old_stat.st_mtime_ns):
        raise ValueError(f"{path} was changed while it was read; start again when it is finished")
    facts = [SIDECAR_FORMAT, old_stat.st_size, old_stat.st_mtime_ns, num_blank, zlib.crc32(starts.data)]
    header = np.array(facts, dtype=np.uint64)
    partial = sidecar_path(path).with_name(f"{sidecar_path(path).name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            np.save(file, np.concatenate([header, starts]))
        partial.replace(sidecar_path(path))
    except OSError:  # the folder is read-only or full: the next start scans again
        with contextlib.suppress(OSError):
            partial.unlink()
    return _read_sidecar(path, old_stat) or (starts, num_blank)


def _scan(path: Path, size: int, progress: Progress | None) -> tuple[np.ndarray, int]:
    """Find the rows in one pass over the file, in blocks of lines.

    A line's first byte mostly says that it isn't blank.
    """
    chunks: list[np.ndarray] = []
    num_blank = 0
    with path.open("rb") as file:
        position = len(BYTE_ORDER_MARK) if file.read(3) == BYTE_ORDER_MARK else 0
        file.seek(position)
        while block := file.read(BLOCK_BYTES) + file.readline():
            data = np.frombuffer(block, dtype=np.uint8)
            ends = np.flatnonzero(data == NEWLINE) + 1
            ends = ends if data[-1] == NEWLINE else np.append(ends, len(data))
            starts = np.concatenate([[0], ends[:-1]])
            blank = data[starts] == NEWLINE
            for line in np.flatnonzero((data[starts] != BRACE) & ~blank):
                blank[line] = not block[starts[line] : ends[line]].strip(b" \t\r\n")
            num_blank += int(blank.sum())
            chunks.append((starts[~blank] + position).astype(np.uint64))
            position += len(block)
            if progress is not None:
                progress("finding the lines of the corpus (bytes)", position, size)
    return np.concatenate([*chunks, np.array([size], dtype=np.uint64)]), num_blank


def _read_sidecar(path: Path, stat: os.stat_result) -> tuple[np.ndarray, int] | None:
    """Return the kept offsets, memory-mapped, or None if there are no whole ones for this size and time."""
    try:
        values = np.load(sidecar_path(path), mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    if values.dtype != np.uint64 or values.ndim != 1 or len(values) < 7 or values[-1] != stat.st_size:
        return None
    if values[:3].tolist() != [SIDECAR_FORMAT, stat.st_size, stat.st_mtime_ns]:
        return None
    if values[4] != zlib.crc32(np.asarray(values[5:]).data):
        return None
    return np.asarray(values[5:]), int(values[3])


def check_beginning(path: Path) -> None:
    """Raise ValueError if a file's first bytes are those of another format than lines of JSON in UTF-8."""
    with path.open("rb") as file:
        beginning = file.read(512)
    for magic, name, command in _PACKED:
        if beginning.startswith(magic):
            raise ValueError(
                f"Found {name} data in {path}; expected lines of JSON. Unpack it: `{command} {path}`, and "
                "give the .jsonl file."
            )
    encoding = next((name for mark, name in _WIDE if beginning.startswith(mark)), None)
    if encoding is None and beginning[:64].count(0) > 8:
        encoding = "UTF-16"
    if encoding is not None:
        raise ValueError(
            f"Found {encoding} text in {path}; expected UTF-8: `iconv -f {encoding} -t UTF-8 {path} > "
            "corpus.jsonl`, and give that file."
        )
    if beginning.removeprefix(BYTE_ORDER_MARK).lstrip().startswith(b"["):
        raise ValueError(
            f"Found a JSON array in {path}; expected one object a line: `jq -c '.[]' {path} > corpus.jsonl`, "
            "and give that file."
        )


def unpack(packed: Path, progress: Progress | None = None) -> Path:
    """Unpack `x.jsonl.gz` or `x.jsonl.bz2` to `x.jsonl` beside it, once.

    A finished `x.jsonl` is used as it is. The file is written under another name and then renamed, so that
    half a file is never used. A second process that wants the same file waits. An `x.jsonl` is never
    overwritten.

    Returns:
        The path of `x.jsonl`.

    Raises:
        ValueError: For a broken file, a full disk, a folder that can't be written to, and an `x.jsonl` that
            is older than the packed file.
    """
    target = packed.with_suffix("")
    partial = target.with_name(target.name + ".partial")
    if target.exists():
        if target.stat().st_mtime >= packed.stat().st_mtime:
            return target
        remedy = f"remove it and it is unpacked again, or give {target} itself"
        raise ValueError(f"{target} is older than {packed}: {remedy}")
    try:
        # It is opened for writing, because NFS gives no exclusive lock for less. It is not truncated, because
        # another process may be writing it.
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666), "wb") as file:
            with contextlib.suppress(OSError):  # some file systems have no locks
                fcntl.flock(file, fcntl.LOCK_EX)
            if not os.fstat(file.fileno()).st_nlink:  # the process that had the lock has removed the file
                return unpack(packed, progress)
            try:
                if target.exists():  # the process that had the lock has unpacked it
                    return target
                file.truncate(0)
                is_bzip2 = packed.suffix == ".bz2"
                with (
                    packed.open("rb") as raw,
                    bz2.BZ2File(raw) if is_bzip2 else gzip.GzipFile(fileobj=raw) as stream,
                ):
                    if stream.peek(512)[257:262] == b"ustar":
                        raise ValueError(
                            f"{packed} holds a tar archive (as wiki-18.jsonl.gz does). "
                            "`python -m data_prep.wiki18` downloads and unpacks that; any other: "
                            f"`tar -xOzf {packed} > corpus.jsonl`, and give it"
                        )
                    while block := stream.read(BLOCK_BYTES):
                        file.write(block)
                        if progress is not None:
                            progress("unpacking the corpus (bytes)", raw.tell(), packed.stat().st_size)
                file.flush()
                os.fsync(file.fileno())
                partial.replace(target)
            finally:
                partial.unlink(missing_ok=True)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        kind = "bzip2" if packed.suffix == ".bz2" else "gzip"
        raise ValueError(f"{packed}: not a whole {kind} file ({error}); download it again") from None
    except OSError as error:
        if error.errno is None:  # of bz2: what it reads is none of its data
            raise ValueError(f"{packed}: not a whole bzip2 file ({error}); download it again") from None
        command = "bzip2" if packed.suffix == ".bz2" else "gzip"
        raise ValueError(
            f"{packed} can't be unpacked to {target} ({error.strerror}). Unpack it where there is room: "
            f"`{command} -dc {packed} > /elsewhere/{target.name}`, and give that file"
        ) from None
    return target
