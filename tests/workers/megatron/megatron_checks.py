"""Checks of parts of models on Megatron that need several processes; run by `megatron_ranks.run_ranks`."""

import torch
import torch.distributed as dist
from megatron_ranks import ASKED, micro_batches

from verl.packing.linear_logprob import linear_log_prob

CPU = torch.device("cpu")


def log_probs(rank, world_size, chunk_rows, temperature):
    """Of a vocabulary that the ranks share unevenly: outputs and gradients of the whole matrix."""
    torch.manual_seed(0)
    vocabulary = 17
    rows = -(-17 // world_size)
    hidden = torch.randn(11, 6)
    weight = torch.randn(vocabulary, 6)
    labels = torch.randint(vocabulary, (11,))
    padding = torch.full((rows * world_size - vocabulary, 6), 100.0)  # would win, if it took part
    own = torch.cat([weight, padding])[rank * rows : (rank + 1) * rows].clone().requires_grad_()
    mine = hidden.clone().requires_grad_()
    whole = hidden.clone().requires_grad_()
    weight.requires_grad_()
    shared = dist.group.WORLD, vocabulary
    got = linear_log_prob(mine, own, labels, temperature, True, True, chunk_rows, *shared)
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
    unasked = linear_log_prob(hidden, own, labels, temperature, False, False, None, *shared)
    torch.testing.assert_close(unasked[0], got[0], rtol=1e-6, atol=1e-6)
    assert not unasked[1].any() and not unasked[1].requires_grad and not unasked[2].any()


def own_slices(rank, world_size, folder):
    """A rank reads what it holds and no more; another model of the same sizes shares the groups, and a
    frozen one gives the same outputs.
    """
    from verl.workers.megatron.model import build_model, initial_weights
    from verl.workers.megatron.settings import ParallelSizes

    sizes = ParallelSizes(tensor=2)
    block = {"path": folder}
    num_read = 0
    built = build_model(block, sizes, CPU, torch.float32)
    read = initial_weights(block, built)

    def counted(piece, part):
        nonlocal num_read
        tensor = read(piece, part)
        num_read += tensor.numel()
        return tensor

    own = sum(parameter.numel() for parameter in built.stage.parameters())
    built.weights.fill(built.parameter, counted)
    padding = built.shape.hidden * (built.shape.padded_vocabulary(2) - built.shape.vocabulary) * rank
    assert num_read == own - padding * (1 if built.shape.tied else 2)
    frozen = build_model(block, sizes, CPU, torch.float32)
    frozen.stage.requires_grad_(False)
    for part in micro_batches():
        with torch.no_grad():
            again = frozen.stage(part, **ASKED)
        for ours, theirs in zip(built.stage(part, **ASKED), again, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
