"""What one rank does in tests of sequence parallelism; run by `ranks.run_ranks`."""

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3Config

from verl.packing.attention import PACKED_ATTENTION, Packing, packed_attention_forward
from verl.packing.packs import pack_rows, shard_micro_batch
from verl.packing.ulysses import TokenShare
from verl.workers.engine.loading import PolicyModel

NUM_RANKS = 3
NUM_TOKENS = 32  # 11, 11, 10
HEADS = {"as many": 6, "divided": 3, "repeated": 2, "one": 1}  # key and value heads beside 6 query heads
SHAPES = {"packed": (False, True), "padded": (True, True), "whole last layer": (False, False)}


def attention_inputs(num_key_heads):
    generator = torch.Generator().manual_seed(num_key_heads)
    q, k, v, weights = (
        torch.randn(NUM_TOKENS, heads, 8, generator=generator, dtype=torch.float64)
        for heads in (6, num_key_heads, num_key_heads, 6)
    )
    return q, k, v, weights


def packing(share=None):
    """Three sequences; the third begins as the first does."""
    keys = torch.cat([torch.arange(12), torch.arange(12, 25), torch.arange(5), torch.arange(25, 32)])
    plain = Packing.of([12, 13, 7], "cpu", [12, 13, 12], keys)
    return Packing(**{**vars(plain), "share": share})


def attention(num_key_heads, share=None):
    """(output, gradients of q, k, v), of this rank's tokens."""
    q, k, v, weights = attention_inputs(num_key_heads)
    tokens = slice(None) if share is None else slice(share.start, share.stop)
    own = [x[tokens].requires_grad_() for x in (q, k, v)]
    arguments = [x.transpose(0, 1).unsqueeze(0) for x in own]
    out, _ = packed_attention_forward(torch.nn.Identity(), *arguments, None, packing=packing(share))
    (out[0] * weights[tokens]).sum().backward()
    return out[0].detach(), *(x.grad for x in own)


def model(whole_last_layer=False, checkpointing=False):
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": None}
    made = AutoModelForCausalLM.from_config(
        Qwen3Config(**sizes, **heads), attn_implementation=PACKED_ATTENTION
    )
    if checkpointing:
        made.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy = PolicyModel(made.train())
    if whole_last_layer:
        policy.is_short = False
    return policy


def micro_batch(padded=False, with_loss=True):
    """Four rows with gaps in the mask; the first two begin alike, and differ in a sampled token."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 50, (4, 20), generator=generator)
    ids[1, :12] = ids[0, :12]
    mask = torch.randint(0, 2, (4, 16), generator=generator)
    mask[:2, 8] = 1
    mask[3] = 0
    attention_mask = torch.ones_like(ids)
    attention_mask[2, 15:] = 0
    mask[2, 11:] = 0
    batch = {
        "input_ids": ids,
        "attention_mask": attention_mask,
        "position_ids": torch.arange(20).expand(4, 20),
        "response_mask": mask if with_loss else torch.zeros_like(mask),
    }
    return pack_rows(batch, range(4), "cpu", padded)


def policy_results(policy, part, group=None):
    """(log-probs, entropies), both [U], and the gradients of a loss of both."""
    sharded = None if group is None else shard_micro_batch(part, group)
    outputs = policy(part if sharded is None else sharded.local, 1.3, True)
    if sharded is not None:
        outputs = sharded.gather(outputs)
    log_probs, entropy, _ = outputs
    weights = torch.arange(1.0, 1.0 + len(log_probs))
    (weights * (log_probs + 0.3 * entropy)).sum().backward()
    gradients = {name: p.grad for name, p in policy.named_parameters()}
    return log_probs.detach(), entropy.detach(), gradients


def cases(group=None):
    """Name -> results, of everything that the tests compare."""
    share = None if group is None else TokenShare.even(NUM_TOKENS, group)
    results = {name: attention(heads, share) for name, heads in HEADS.items()}
    for name, (padded, short) in SHAPES.items():
        results[name] = policy_results(model(not short), micro_batch(padded), group)
    results["checkpointing"] = policy_results(model(checkpointing=True), micro_batch(), group)
    results["without loss tokens"] = policy_results(model(), micro_batch(with_loss=False), group)
    return results


def save_cases(rank, world_size, out):
    torch.save(cases(dist.group.WORLD), out / f"rank{rank}.pt")
