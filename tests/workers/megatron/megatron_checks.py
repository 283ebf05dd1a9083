"""Checks of parts of models on Megatron that need several processes; run by `megatron_ranks.run_ranks`."""

import pytest
import torch
import torch.distributed as dist
from megatron_ranks import ASKED, micro_batches, share_of_loss

from verl.utils.linear_logprob import linear_log_prob

CPU = torch.device("cpu")


def log_probs(rank, world_size, chunk_rows, temperature):
    """Of a vocabulary that the ranks share unevenly: outputs and gradients of the whole matrix."""
    from verl.workers.megatron.log_prob import vocab_parallel_log_prob

    torch.manual_seed(0)
    vocabulary, rows = 17, -(-17 // world_size)
    hidden, weight = torch.randn(11, 6), torch.randn(vocabulary, 6)
    labels = torch.randint(vocabulary, (11,))
    padding = torch.full((rows * world_size - vocabulary, 6), 100.0)  # would win, if it took part
    own = torch.cat([weight, padding])[rank * rows : (rank + 1) * rows].clone().requires_grad_()
    mine, whole = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    weight.requires_grad_()
    got = vocab_parallel_log_prob(
        mine, own, labels, vocabulary, dist.group.WORLD, temperature, True, True, chunk_rows
    )
    want = linear_log_prob(whole, weight, labels, temperature, True, True)
    scale = torch.linspace(-1, 1, 11)
    for outputs in (got, want):
        (outputs[0] * scale + outputs[1].square()).sum().backward()
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    dist.all_reduce(mine.grad)
    torch.testing.assert_close(mine.grad, whole.grad, rtol=1e-5, atol=1e-5)
    mine_of_whole = weight.grad[rank * rows : (rank + 1) * rows]
    torch.testing.assert_close(own.grad[: len(mine_of_whole)], mine_of_whole, rtol=1e-5, atol=1e-5)
    assert not own.grad[len(mine_of_whole) :].any()
    unasked = vocab_parallel_log_prob(hidden, own, labels, vocabulary, dist.group.WORLD, temperature, False)
    torch.testing.assert_close(unasked[0], got[0], rtol=1e-6, atol=1e-6)
    assert not unasked[1].any() and not unasked[1].requires_grad and not unasked[2].any()


def half_precision(rank, world_size, folder):
    """A model in bf16, cut in two, is close to the same in fp32, and its gradients are of its own type."""
    from verl.workers.megatron.model import build_model
    from verl.workers.megatron.settings import ParallelSizes

    results = []
    for dtype in (torch.float32, torch.bfloat16):
        built = build_model({"path": folder}, ParallelSizes(tensor=2), CPU, dtype, sequence_parallel=True)
        outputs = [built.chunks[0](part, **ASKED) for part in micro_batches()]
        sum(share_of_loss(of_part) for of_part in outputs).backward()
        assert {p.grad.dtype for p in built.chunks[0].parameters()} == {dtype}
        results.append(torch.cat([torch.stack(of_part).detach() for of_part in outputs], dim=1))
    assert results[0].dtype == results[1].dtype == torch.float32
    error = (results[0] - results[1]).abs().mean(dim=1) / results[0].abs().mean(dim=1)
    assert error.max() < 0.05, error


def own_slices(rank, world_size, folder):
    """A rank reads what it holds and no more; another model of the same sizes shares the groups, and a
    frozen one gives the same outputs.
    """
    from verl.workers.megatron.model import build_model, initial_weights
    from verl.workers.megatron.settings import ParallelSizes

    sizes, block, num_read = ParallelSizes(tensor=2), {"path": folder}, 0
    built = build_model(block, sizes, CPU, torch.float32)
    read = initial_weights(block, built)

    def counted(piece, part):
        nonlocal num_read
        tensor = read(piece, part)
        num_read += tensor.numel()
        return tensor

    own = sum(parameter.numel() for chunk in built.chunks for parameter in chunk.parameters())
    built.weights.fill(built.parameter, counted)
    padding = built.shape.hidden * (built.shape.padded_vocabulary(2) - built.shape.vocabulary) * rank
    assert num_read == own - padding * (1 if built.shape.tied else 2)
    frozen = build_model(block, sizes, CPU, torch.float32)
    frozen.chunks[0].requires_grad_(False)
    for part in micro_batches():
        with torch.no_grad():
            again = frozen.chunks[0](part, **ASKED)
        for ours, theirs in zip(built.chunks[0](part, **ASKED), again, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def refusals(rank, world_size, folder, smaller):
    """What is said of groups and folders that don't fit."""
    from verl.workers.megatron import parallel_state
    from verl.workers.megatron.model import build_model
    from verl.workers.megatron.settings import ParallelSizes

    with pytest.raises(ValueError, match="3 processes for one replica .* but there are 2 in all"):
        parallel_state.initialize(ParallelSizes(tensor=3), CPU)
    parallel_state.initialize(ParallelSizes(tensor=2), CPU)
    with pytest.raises(
        ValueError, match="pipeline_model_parallel_size=2.* after tensor_model_parallel_size=2"
    ):
        build_model({"path": folder}, ParallelSizes(pipeline=2), CPU, torch.float32)
    with pytest.raises(ValueError, match=r"embed_tokens.weight' of shape \(41, 16\).*says \(42, 16\)"):
        block = {"path": folder, "override_config": {"vocab_size": 42}}
        build_model(block, ParallelSizes(tensor=2), CPU, torch.float32)
    with pytest.raises(ValueError, match="no model.safetensors"):
        build_model({"path": smaller}, ParallelSizes(tensor=2), CPU, torch.float32)
    assert parallel_state.data_position().leads == (rank == 0)


def only_megatron_sees_it(rank, world_size):
    """CPU support changes Megatron's modules, not torch; questions to tensors only while a block lasts."""
    from megatron.core.tensor_parallel import layers

    from verl.workers.megatron import cpu_support

    cpu_support.install(CPU)
    assert layers.torch is not torch
    assert layers.torch.zeros(1, device="cuda").device == layers.torch.cuda.current_device() == CPU
    with pytest.raises((AssertionError, RuntimeError), match="CUDA"):
        torch.zeros(1, device="cuda")
    state = torch.get_rng_state()
    layers.torch.cuda.manual_seed(3)
    assert torch.equal(torch.get_rng_state(), state)
    tensor = torch.zeros(1)
    with cpu_support.cuda_names(CPU):
        assert tensor.type() == "torch.cuda.FloatTensor" and tensor.cuda() is tensor
    assert tensor.type() == "torch.FloatTensor"
