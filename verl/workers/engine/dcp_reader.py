"""Reading a distributed checkpoint (torch.distributed.checkpoint) without running what its files say.

`dcp/.metadata` is a pickle, and a pickle can name any function and call it. torch loads it all the same, and
unpickles entries that are no tensors. Here the metadata may only name torch's own classes for metadata, only
tensors are read, and only from files in the folder.
"""

from __future__ import annotations

import collections
import pathlib
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, LoadPlan, LoadPlanner
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType
from torch.futures import Future
from torch.serialization import _get_layout

from verl.utils.file_sums import stays_inside

_METADATA_CLASSES = (
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
)
_ALLOWED: dict[tuple[str, str], Any] = {
    (dcp_metadata.__name__, name): getattr(dcp_metadata, name) for name in _METADATA_CLASSES
}
_ALLOWED |= {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _get_layout,  # looks a name up in a table
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("pathlib", "PosixPath"): pathlib.PurePosixPath,  # the folder's name, which nobody reads
    ("pathlib._local", "PosixPath"): pathlib.PurePosixPath,
}


class MetadataUnpickler(pickle.Unpickler):
    """An unpickler that knows torch's classes for metadata, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no class of torch's metadata")


class TensorReader(FileSystemReader):
    """A reader of the tensors in a folder that `torch.distributed.checkpoint` wrote."""

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder)
        self.folder = Path(folder)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read `.metadata`.

        Raises ValueError if it can't be read, or names what is no metadata.
        """
        path = self.folder / ".metadata"
        try:
            with path.open("rb") as file:
                metadata = MetadataUnpickler(file).load()
            if not isinstance(metadata, Metadata):
                raise TypeError(f"it holds a {type(metadata).__name__}")
            for entry in metadata.storage_data.values():
                if not stays_inside(entry.relative_path):
                    raise ValueError(f"it names the file {entry.relative_path!r}, outside of the folder")
        except Exception as error:  # a damaged pickle raises errors of all kinds
            raise ValueError(
                f"Found {path} that can't be read ({type(error).__name__}: {error}); expected the metadata "
                "of a checkpoint. Take another checkpoint."
            ) from error
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:  # torch would unpickle it
                raise ValueError(
                    f"{self.folder}: {item.storage_index.fqn} is no tensor; only tensors are read"
                )
        return super().read_data(plan, planner)
