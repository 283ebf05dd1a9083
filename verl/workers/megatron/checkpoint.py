"""A MegatronEngine on disk, in the format of `verl.workers.engine.checkpoint`: the same names, whole tensors.

    shards --gathered one tensor at a time--> (name, whole tensor) --each kept by one process--> <folder>/dcp
    <folder>/dcp --each read by one process--> sent to all, one at a time --> every process takes its shard

So a run goes on over FSDP2 or megatron-core, on any number of processes. Every process keeps about as much
of the checkpoint in CPU memory; none has all of it.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import parallel_state as mpu
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verl.workers.engine.checkpoint import (
    check_complete,
    check_fits,
    has_optimizer,
    load_progress,
    load_tensors,
    save_beside,
    save_progress,
    save_tensors,
)
from verl.workers.engine.snapshot import Snapshot
from verl.workers.megatron.optimizer import KINDS
from verl.workers.megatron.weights import Parameter, Piece, WeightMap

if TYPE_CHECKING:
    from verl.workers.megatron.megatron_engine import MegatronEngine

GENERATION_FILE = "generation_config.json"
MAX_FILE_BYTES = 5 * 2**30  # of one safetensors file


def saved_name(weights: WeightMap, name: str) -> str:
    """What a checkpoint calls a parameter: `TrainEngine`'s module has the model as `model`; a value model
    there has no words `model.` of its own.
    """
    return f"model.{name}" if weights.has_head else name


def _again(weights: WeightMap, saved: str) -> list[str]:
    """The other name under which a checkpoint has the weights of a tied embedding."""
    is_tied = weights.has_head and weights.shape.tied
    return ["model.lm_head.weight"] if is_tied and saved == "model.model.embed_tokens.weight" else []


def _owner(number: int) -> int:
    """The process that keeps the tensor with this number in a checkpoint."""
    return number % dist.get_world_size()


def local_tensors(
    weights: WeightMap, stream: Iterator[tuple[str, Tensor]]
) -> Iterator[tuple[Parameter, Tensor]]:
    """(parameter, this process's tensor for it) of all that it has, from a stream of whole tensors in the
    order of `whole_tensors`.
    """
    stage = mpu.get_pipeline_model_parallel_rank()
    pieces: dict[str, Tensor] = {}

    def read(piece: Piece, region: tuple[slice, ...]) -> Tensor:
        return pieces[piece.name][region]

    for parameter in weights.parameters:
        if not parameter.copied:  # a copy comes right after what it is of
            pieces = {name: whole for _, (name, whole) in zip(parameter.pieces, stream, strict=False)}
        if parameter.stage == stage:
            yield parameter, weights.local(parameter, read)


def save_checkpoint(engine: MegatronEngine, path: str | Path) -> None:
    """Writes everything that the next update depends on into a folder, which is made."""
    take_snapshot(engine, path, None).write()
    dist.barrier()


def take_snapshot(engine: MegatronEngine, path: str | Path, group: dist.ProcessGroup | None) -> Snapshot:
    """What `save_checkpoint` writes: the tensors, of which each process keeps its share by now, in the
    snapshot, all else at once. group: of all processes, for a thread in the background.
    """
    assert engine.scheduler is not None
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    with engine.loaded(optimizer=True):
        share = _collected(engine)
    save_progress(folder, engine.scheduler, engine.weights_version, engine.device, dist.get_rank())
    return Snapshot(write=partial(save_tensors, share, folder / "dcp", group))


def _collected(engine: MegatronEngine) -> dict[str, Any]:
    """This process's share of the checkpoint, in CPU memory."""
    optimizer, weights = engine.optimizer, engine.built.weights
    assert optimizer is not None
    step = torch.tensor(float(engine.num_updates()))
    model: dict[str, Tensor] = {}
    state: dict[str, dict[str, Tensor]] = {}
    for kind in KINDS:
        for number, (name, whole) in enumerate(engine.whole_tensors(kind)):
            if _owner(number) != dist.get_rank():
                continue
            name, kept = saved_name(weights, name), whole.to("cpu", copy=True)
            if kind == "param":
                model |= dict.fromkeys([name, *_again(weights, name)], kept)
                state[name] = {"step": step.clone()}
            else:
                state[name][kind] = kept
    return {"model": model, "optimizer": {"state": state}}


def load_checkpoint(engine: MegatronEngine, path: str | Path) -> None:
    """Puts the engine where `save` left one, of this kind or over FSDP2, with any number of processes."""
    assert engine.optimizer is not None and engine.scheduler is not None
    folder = Path(path)
    check_complete(folder)
    kinds = KINDS if has_optimizer(folder) else KINDS[:1]
    expected: dict[str, tuple[int, ...]] = {}
    for name, shape in engine.built.weights.shapes().items():
        name = saved_name(engine.built.weights, name)
        expected |= dict.fromkeys(
            [f"model.{saved}" for saved in (name, *_again(engine.built.weights, name))], shape
        )
        if kinds == KINDS:
            state = f"optimizer.state.{name}"
            expected |= {f"{state}.step": (), f"{state}.exp_avg": shape, f"{state}.exp_avg_sq": shape}
    check_fits(expected, folder)
    with engine.loaded(optimizer=True):
        for kind in kinds:
            prefix, ending = ("model.", "") if kind == "param" else ("optimizer.state.", f".{kind}")
            stream = read_whole(engine, folder / "dcp", prefix, ending)
            for parameter, local in local_tensors(engine.built.weights, stream):
                engine.optimizer.put(engine.built.parameter(parameter.chunk, parameter.name), kind, local)
        if kinds == KINDS:
            engine.optimizer.put_num_steps(_read_step(engine, folder))
    engine.weights_version = load_progress(folder, engine.scheduler, engine.device, dist.get_rank())
    dist.barrier()


def _read_step(engine: MegatronEngine, folder: Path) -> int:
    """Optimizer steps made: those of any parameter, as each is updated in every step."""
    name = saved_name(engine.built.weights, next(iter(engine.built.weights.shapes())))
    step = {f"optimizer.state.{name}.step": torch.zeros(())}
    load_tensors(step, folder / "dcp")
    return int(next(iter(step.values())))


def read_whole(
    engine: MegatronEngine, folder: Path, prefix: str, ending: str = ""
) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, whole tensor in fp32 on the engine's device) of a folder of `save_tensors`, in the
    order of `whole_tensors`. All processes go through it together.
    """
    weights = engine.built.weights
    shapes = weights.shapes()
    mine = {
        f"{prefix}{saved_name(weights, name)}{ending}": torch.empty(shape)
        for number, (name, shape) in enumerate(shapes.items())
        if _owner(number) == dist.get_rank()
    }
    load_tensors(mine, folder)
    for number, (name, shape) in enumerate(shapes.items()):
        saved = f"{prefix}{saved_name(weights, name)}{ending}"
        whole = (
            mine.pop(saved).to(engine.device) if saved in mine else torch.empty(shape, device=engine.device)
        )
        dist.broadcast(whole, _owner(number))
        yield name, whole


def save_weights(engine: MegatronEngine, folder: Path) -> None:
    """Writes the weights alone, as the reference's part of a checkpoint."""
    weights = engine.built.weights
    with engine.loaded():
        share = {
            saved_name(weights, name): whole.to("cpu", copy=True)
            for number, (name, whole) in enumerate(engine.whole_tensors("param"))
            if _owner(number) == dist.get_rank()
        }
    save_tensors(share, folder)


def save_hf(
    engine: MegatronEngine, path: str | Path, tokenizer: PreTrainedTokenizerBase | None, base: str | Path
) -> None:
    """Writes a Hugging Face folder; of several files each process writes its own, as they fill up."""
    folder = Path(path)
    files = _begin_hf(engine, folder, tokenizer, base)
    with engine.loaded(optimizer=True):  # main weights are of its state
        stream = engine.whole_tensors("param")
        for number, (file, names) in enumerate(files.items()):
            tensors: dict[str, Tensor] = {}
            for _, (name, whole) in zip(names, stream, strict=False):
                if _owner(number) == dist.get_rank():
                    tensors[name] = whole.to("cpu", copy=True)
            if tensors:
                _write_file(tensors, folder / file, engine.precision.model)
    dist.barrier()


def hf_snapshot(
    engine: MegatronEngine,
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase | None,
    base: str | Path,
    saved: str | Path,
) -> Snapshot:
    """What `save_hf` writes, of the weights that are in the checkpoint `saved` by then: none are gathered."""
    folder, weights, dtype = Path(path), engine.built.weights, engine.precision.model
    files = _begin_hf(engine, folder, tokenizer, base)
    mine = {file: names for n, (file, names) in enumerate(files.items()) if _owner(n) == dist.get_rank()}

    def write() -> None:
        for file, names in mine.items():
            shapes = weights.shapes()
            tensors = {f"model.{saved_name(weights, name)}": torch.empty(shapes[name]) for name in names}
            with warnings.catch_warnings():  # that one process reads alone is meant
                warnings.filterwarnings(
                    "ignore", message="torch.distributed is disabled", category=UserWarning
                )
                dcp.load(tensors, checkpoint_id=Path(saved) / "dcp", no_dist=True)
            plain = dict(zip(names, tensors.values(), strict=True))
            _write_file(plain, folder / file, dtype)

    return Snapshot(write=write)


def _begin_hf(
    engine: MegatronEngine, folder: Path, tokenizer: PreTrainedTokenizerBase | None, base: str | Path
) -> dict[str, list[str]]:
    """Makes the folder with all but the weights; returns file name -> the names of its tensors."""
    shapes, dtype = engine.built.weights.shapes(), engine.precision.model
    files = _files(shapes, dtype)
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        config = engine.built.hugging_face
        config.dtype = dtype
        config.save_pretrained(folder)
        if len(files) > 1:
            _write_index(folder, files, shapes, dtype)
        generation = Path(base).expanduser() / GENERATION_FILE
        if generation.is_file():
            shutil.copyfile(generation, folder / GENERATION_FILE)
        save_beside(folder, tokenizer, base)
    dist.barrier()
    return files


def _write_file(tensors: Mapping[str, Tensor], file: Path, dtype: torch.dtype) -> None:
    save_file(
        {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}, file, {"format": "pt"}
    )


def _files(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> dict[str, list[str]]:
    """File name -> the names of its tensors: in order, each file as full as it may be."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, shape in shapes.items():
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        if groups[-1] and size + num_bytes > MAX_FILE_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += num_bytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {
        f"model-{number:05d}-of-{len(groups):05d}.safetensors": names
        for number, names in enumerate(groups, start=1)
    }


def _write_index(
    folder: Path, files: Mapping[str, list[str]], shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> None:
    total = sum(torch.Size(shape).numel() for shape in shapes.values()) * dtype.itemsize
    places = {name: file for file, names in files.items() for name in names}
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
