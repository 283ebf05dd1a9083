"""Versions of a model's weights in a folder: from one writer to readers elsewhere, bit for bit.

    writer: bits XOR bits of the version before -> bytes by their place -> zstd -> VERSION/weights.zst
    reader: the same backwards, onto the version that it has                    VERSION/manifest.json (last)

A version is a delta to the one before it or, from time to time, an anchor, which needs no other version. A
reader that lacks the base of a delta, or finds a wrong checksum, goes on from the newest anchor. It leaves a
mark, LOADED.name, beside what it has read. A version is deleted once nobody can need it any more.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard
from torch import Tensor

from verl.utils.durable import sync
from verl.utils.json_files import write_text_atomically

logger = logging.getLogger(__name__)

PAYLOAD = "weights.zst"
MANIFEST = "manifest.json"
LOADED_PREFIX = "LOADED."
FAILED = "FAILED"
MOST_CHANGED = 0.6  # share of the bytes; a delta with more of them is hardly smaller than an anchor
LEVEL = 1  # level of zstd; level 3 took up to three times as long and saved nothing
POLL_SECONDS = 0.02

Bits = dict[str, np.ndarray]


class WeightsUnreadable(RuntimeError):
    """A version that can't be read, nor restored from an anchor; the message says what is missing."""


def bits_of(tensor: Tensor) -> np.ndarray:
    """Return the bytes of a tensor in CPU memory, uint8 [number of bytes].

    They are the tensor's own memory if it is contiguous.
    """
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()


def compress(bits: np.ndarray, size: int) -> bytes:
    """Compress the bytes of elements of `size` bytes.

    All first bytes of elements come first, then all second ones, and so on. Small updates change the low
    bytes, so the bytes that stay the same lie together.
    """
    return zstandard.ZstdCompressor(level=LEVEL).compress(np.ascontiguousarray(bits.reshape(-1, size).T).data)


def decompress(data: bytes, size: int, num_bytes: int) -> np.ndarray:
    """Return the bytes that `compress` got. Raises ZstdError if the data is damaged."""
    stored_size = zstandard.frame_content_size(data)
    if stored_size != num_bytes:
        raise zstandard.ZstdError(f"{stored_size} bytes in place of {num_bytes}")
    planes = np.frombuffer(zstandard.ZstdDecompressor().decompress(data), np.uint8).reshape(size, -1)
    return planes.T.copy().reshape(-1)


def versions_in(folder: Path) -> list[int]:
    """Return all complete versions, in order."""
    return sorted(int(path.parent.name) for path in folder.glob(f"*/{MANIFEST}"))


class WeightWriter:
    """The only writer into a folder, which it empties first.

    Args:
        folder: the folder of the versions.
        anchor_every: one of so many versions is an anchor (1: all are). An anchor comes sooner if the deltas
            since the last one take more room than it.
        readers: names of all readers. A version that one of them has not read stays.
    """

    def __init__(self, folder: Path, anchor_every: int, readers: Sequence[str]) -> None:
        self.folder = folder
        self.anchor_every = anchor_every
        self.readers = readers
        if folder.is_dir():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        self._bits: Bits = {}  # bits of the newest version
        self._layout: list[tuple[str, list[int], str]] = []
        self._manifest: dict[str, Any] = {"version": -1}
        self._sizes: list[int] = []  # bytes of the last anchor's file, and of the deltas since
        self._anchors: list[int] = []
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights")
        self._written: Future[Any] | None = None

    def write_in_background(self, pairs: Sequence[tuple[str, Tensor]], version: int) -> None:
        """Write in a thread, as `write` does, once the version that was begun before is written.

        Raises the error of that version, if there was one.
        """
        if self._written is not None:
            self._written.result()
        self._written = self._thread.submit(self.write, pairs, version)

    def write(self, pairs: Iterable[tuple[str, Tensor]], version: int) -> dict[str, Any]:
        """Write the model as `version`, and return the manifest.

        A version that exists already stays as it is.

        Args:
            pairs: names, and tensors in CPU memory that nobody changes any more.
            version: higher than those before.

        Raises:
            OSError: the version can't be written. Readers are told.
        """
        if version == self._manifest["version"]:
            return self._manifest
        try:
            self._write(dict(pairs), version)
        except BaseException as error:
            logger.exception("weights %d could not be written", version)
            shutil.rmtree(self.folder / str(version), ignore_errors=True)  # makes room for the reason
            write_text_atomically(self.folder / FAILED, f"{type(error).__name__}: {error}")
            raise
        self._delete_old(version)
        return self._manifest

    def close(self) -> None:
        """Wait for what is being written, and delete all versions."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _write(self, weights: Mapping[str, Tensor], version: int) -> None:
        bits = {name: bits_of(tensor) for name, tensor in weights.items()}
        layout = [(name, list(x.shape), str(x.dtype).removeprefix("torch.")) for name, x in weights.items()]
        anchor, *deltas = self._sizes or [0]
        is_delta = layout == self._layout and len(deltas) + 1 < self.anchor_every and sum(deltas) <= anchor
        if is_delta:
            changed = sum(int(np.count_nonzero(new ^ self._bits[name])) for name, new in bits.items())
            is_delta = changed <= MOST_CHANGED * sum(new.nbytes for new in bits.values())
        folder = self.folder / str(version)
        folder.mkdir()
        tensors = []
        offset = 0
        with (folder / PAYLOAD).open("wb") as file:
            for name, shape, dtype in layout:
                new = bits[name]
                data = compress(new ^ self._bits[name] if is_delta else new, weights[name].element_size())
                file.write(data)
                tensors.append({"name": name, "shape": shape, "dtype": dtype, "offset": offset})
                tensors[-1] |= {"nbytes": len(data), "checksum": zlib.crc32(new.data)}
                offset += len(data)
        sync(folder / PAYLOAD)
        manifest = {
            "version": version,
            "base_version": self._manifest["version"] if is_delta else None,
            "kind": "delta" if is_delta else "full",
            "files": {PAYLOAD: offset},
            "tensors": tensors,
        }
        partial = folder / f"{MANIFEST}.partial"
        partial.write_text(json.dumps(manifest), encoding="utf-8")
        sync(partial)
        os.replace(partial, folder / MANIFEST)
        sync(folder)
        if not is_delta:
            self._sizes = []
            self._anchors.append(version)
        self._sizes.append(offset)
        self._bits = bits
        self._layout = layout
        self._manifest = manifest

    def _delete_old(self, newest: int) -> None:
        """Delete all versions before the last anchor that every reader has reached."""
        marks = [self.folder.glob(f"*/{LOADED_PREFIX}{name}") for name in self.readers]
        last_read = [
            max((int(mark.parent.name) for mark in reader_marks), default=-1) for reader_marks in marks
        ]
        slowest = min(last_read, default=newest)
        needed = max((anchor for anchor in self._anchors if anchor <= slowest), default=self._anchors[0])
        self._anchors = [anchor for anchor in self._anchors if anchor >= needed]
        for version in versions_in(self.folder):
            if version < needed:
                shutil.rmtree(self.folder / str(version), ignore_errors=True)


class WeightReader:
    """A reader of what a `WeightWriter` writes; `name` is one of the writer's `readers`."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.name = name
        self.version: int | None = None  # the version that it has
        self.num_bytes = 0  # bytes that it read from files
        self._bits: Bits = {}
        self._closing = threading.Event()

    def read(self, version: int, seconds: float = 0.0) -> list[tuple[str, Tensor]]:
        """Return a version, bit for bit, in tensors that nobody changes; wait up to `seconds` for it.

        Raises WeightsUnreadable if it does not come or can't be restored.
        """
        self._wait(version, seconds)
        try:
            bits, tensors = self._restored(version, self.version)
        except WeightsUnreadable as error:
            if self.version is None:
                raise
            logger.warning("%s; going on from the newest anchor", error)
            bits, tensors = self._restored(version, None)
        self.version = version
        self._bits = bits
        (self.folder / str(version) / f"{LOADED_PREFIX}{self.name}").touch()
        types = {entry["name"]: (getattr(torch, entry["dtype"]), entry["shape"]) for entry in tensors}
        return [(n, torch.from_numpy(bits[n]).view(dtype).reshape(s)) for n, (dtype, s) in types.items()]

    def close(self) -> None:
        """End the waiting of everyone who waits in `read`."""
        self._closing.set()

    def _wait(self, version: int, seconds: float) -> None:
        due = time.monotonic() + seconds
        while version not in (versions := versions_in(self.folder)):
            if (failure := self.folder / FAILED).is_file():
                raise WeightsUnreadable(f"weights {version} were not written: {failure.read_text()}")
            if self._closing.wait(POLL_SECONDS) or time.monotonic() >= due:
                raise WeightsUnreadable(
                    f"weights {version} did not come into {self.folder} within {seconds:g} s; found versions "
                    f"{versions}. Is it a folder that all nodes see (actor_rollout_ref.rollout.weight_dir)?"
                )

    def _restored(self, version: int, held: int | None) -> tuple[Bits, list[dict[str, Any]]]:
        """Return a version made from the one that is held, with the tensors of its manifest.

        If none is held (None), the version is made from an anchor.
        """
        chain: list[dict[str, Any]] = []
        needed: int | None = version
        while needed is not None and (not chain or needed != held):
            try:
                chain.append(json.loads((self.folder / str(needed) / MANIFEST).read_text(encoding="utf-8")))
            except (OSError, ValueError) as error:
                raise WeightsUnreadable(
                    f"weights {version} in {self.folder} need version {needed}, which is not there "
                    f"({type(error).__name__}); found {versions_in(self.folder)}, and {self.name} has {held}"
                ) from error
            needed = chain[-1]["base_version"]
        bits = self._bits
        try:
            for manifest in reversed(chain):
                bits = self._applied(manifest, bits)
        except OSError as error:
            raise WeightsUnreadable(f"weights {version} in {self.folder}: {error}") from error
        return bits, chain[0]["tensors"]

    def _applied(self, manifest: Mapping[str, Any], base: Bits) -> Bits:
        path = self.folder / str(manifest["version"]) / PAYLOAD
        bits: Bits = {}
        with path.open("rb") as file:
            for entry in manifest["tensors"]:
                name = entry["name"]
                size = getattr(torch, entry["dtype"]).itemsize
                data = file.read(entry["nbytes"])
                self.num_bytes += len(data)
                try:
                    new = decompress(data, size, int(np.prod(entry["shape"], dtype=np.int64)) * size)
                    if manifest["kind"] == "delta":
                        new ^= base[name]
                    is_right = zlib.crc32(new.data) == entry["checksum"]
                except (zstandard.ZstdError, KeyError, ValueError):
                    is_right = False
                if not is_right:
                    label = f"{name} of weights {manifest['version']} ({manifest['kind']}) in {path}"
                    raise WeightsUnreadable(f"{label} is not what was written: its checksum is another")
                bits[name] = new
        return bits
