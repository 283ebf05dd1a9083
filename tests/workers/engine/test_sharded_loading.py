"""Of a model that several processes share each reads its own part, and never has more in memory."""

import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from tiny_training import CPU, make_config
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Qwen3Config

from verl.config import replace_values
from verl.workers.engine.fsdp_engine import TrainEngine
from verl.workers.engine.loading import Precision, load_policy, load_value_model

pytestmark = pytest.mark.slow
SIZES = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "head_dim": 64}
SIZES |= {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 8192}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    """30 million weights in bfloat16, the head's own (not tied), in several files."""
    folder = tmp_path_factory.mktemp("shared_model")
    torch.manual_seed(0)
    config = Qwen3Config(**SIZES, tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="20MB")
    return str(folder)


def private_bytes() -> int:
    """Memory of this process that no file stands for."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("RssAnon:")[2].split()[0])


class Peak:
    """The most private memory inside of a block, beyond that at its beginning."""

    def __enter__(self):
        self.begin = self.most = private_bytes()
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self):
        while not self.over.wait(0.001):
            self.most = max(self.most, private_bytes())

    def __exit__(self, *_):
        self.over.set()
        self.thread.join()
        self.bytes = max(self.most, private_bytes()) - self.begin


def engine_of(model_path, is_policy, reads, fsdp_size, *settings):
    block = make_config(model_path, *settings).actor_rollout_ref
    precision = Precision.from_config(block.actor.fsdp_config, CPU)
    load = load_policy if is_policy else load_value_model
    module = load(block.model, precision.model, reads_weights=reads)
    fsdp_config = replace_values(block.actor.fsdp_config, {"fsdp_size": fsdp_size})
    return TrainEngine(module, precision, fsdp_config, CPU, 2)


def load_in_two_ways(rank, world_size, model_path, out):
    with Peak() as peak:
        parts = engine_of(model_path, True, False, -1)
    assert parts.module.unread is not None
    num_bytes = 4 * sum(p.numel() for p in parts.module.parameters())
    result = {"in parts": peak.bytes / num_bytes}
    del parts
    with Peak() as peak:
        engine_of(model_path, True, True, -1)
    result["whole"] = peak.bytes / num_bytes
    torch.save(result, out / f"peaks{rank}.pt")
    for is_policy, fsdp_size, settings in (
        (True, 1, []),  # hybrid: each has all
        (False, -1, []),
        (True, -1, ["actor_rollout_ref.model.lora_rank=4"]),
    ):
        parts, whole = (
            engine_of(model_path, is_policy, reads, fsdp_size, *settings).module for reads in (False, True)
        )
        assert parts.unread is not None and whole.unread is None
        tensors = [
            dict(module.named_parameters()) | dict(module.named_buffers()) for module in (parts, whole)
        ]
        assert tensors[0].keys() == tensors[1].keys()
        for name, tensor in tensors[0].items():
            other = tensors[1][name]
            assert tensor.requires_grad == other.requires_grad and tensor.dtype == other.dtype
            own = [x.to_local() if isinstance(x, DTensor) else x for x in (tensor, other)]
            assert torch.equal(*own), name


def test_each_process_reads_its_own_part(model_path, tmp_path):
    run_ranks(load_in_two_ways, 2, model_path, tmp_path)
    for rank in range(2):
        peaks = torch.load(tmp_path / f"peaks{rank}.pt")
        assert peaks["in parts"] < 0.75 and peaks["whole"] > 1.0, peaks


def load_tied(rank, world_size, folder, head_in_file):
    model = AutoModelForCausalLM.from_config(Qwen3Config(**SIZES, tie_word_embeddings=True))
    state = model.state_dict()
    state["lm_head.weight"] = state["lm_head.weight"].clone()
    if head_in_file == "none":
        del state["lm_head.weight"]
    elif head_in_file == "another":
        state["lm_head.weight"] += 1
    if rank == 0:
        model.config.save_pretrained(folder)
        save_file(state, folder / "model.safetensors")
    torch.distributed.barrier()
    module = engine_of(folder, True, False, -1).module
    assert module.unread is not None
    embedding = module.model.get_input_embeddings().weight
    head = module.model.get_output_embeddings().weight
    assert (embedding is head) == (head_in_file != "another")  # the files decide
    if rank == 0:
        saved = load_file(folder / "model.safetensors")
        assert torch.equal(embedding.to_local(), saved["model.embed_tokens.weight"].chunk(2)[0])
        if head_in_file == "another":
            assert torch.equal(head.to_local(), saved["lm_head.weight"].chunk(2)[0])


@pytest.mark.parametrize("head_in_file", ["none", "equal", "another"])
def test_tied_weights_are_read_once_and_stay_tied(tmp_path, head_in_file):
    run_ranks(load_tied, 2, tmp_path, head_in_file)


@pytest.mark.parametrize("change", ["names", "files"])
def test_what_can_not_be_read_in_parts_is_loaded_whole(model_path, tmp_path, change):
    """A backbone by itself has other names than the policy; a file beside those of the index may hold any."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    state = dict(model.state_dict())
    if change == "names":
        state = {name.replace("model.", "model.language_model.", 1): x for name, x in state.items()}
        save_file(state, tmp_path / "model.safetensors")
        loads = pytest.raises(ValueError, match="have no weights")
    else:
        save_file({name: x + 1 for name, x in state.items()}, tmp_path / "consolidated.safetensors")
        loads = nullcontext()
    with loads:
        loaded = load_policy({"path": str(tmp_path)}, torch.float32, reads_weights=False)
        assert loaded.unread is None
        assert all(torch.equal(x, state[name]) for name, x in loaded.model.state_dict().items())
