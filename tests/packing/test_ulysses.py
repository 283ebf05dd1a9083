"""Sequence parallelism: several processes with a share of the tokens each compute what one does with all."""

from dataclasses import dataclass

import pytest
import sequence_ranks
import torch
from ranks import run_ranks

from verl.packing.packs import shard_micro_batch
from verl.packing.ulysses import TokenShare


@dataclass
class Place:
    """Where a process stands in a group, for what needs no exchange."""

    position: int
    count: int

    def rank(self):
        return self.position

    def size(self):
        return self.count


@pytest.mark.parametrize("num_tokens", [0, 2, 7, 9])
def test_each_token_has_one_process_and_shares_are_even(num_tokens):
    shares = [TokenShare.even(num_tokens, Place(rank, 4)) for rank in range(4)]
    assert [share.start for share in shares[1:]] + [num_tokens] == [share.stop for share in shares]
    assert max(shares[0].counts) - min(shares[0].counts) <= 1
    places = torch.arange(num_tokens)[::2]
    assert torch.cat([share.local_positions(places) + share.start for share in shares]).equal(places)


def test_a_share_of_a_micro_batch_holds_the_tokens_and_the_loss_tokens_that_they_predict():
    part = sequence_ranks.micro_batch()
    sharded = [shard_micro_batch(part, Place(rank, 3)) for rank in range(3)]
    assert torch.cat([s.local.input_ids for s in sharded], dim=1).equal(part.input_ids)
    assert torch.cat([s.local.labels for s in sharded]).equal(part.labels)
    places = [s.local.predicted_from + s.share.start for s in sharded]
    assert torch.cat(places).equal(part.predicted_from) and sum(sharded[0].loss_counts) == len(part.labels)
    for s in sharded:
        assert ((s.local.predicted_from >= 0) & (s.local.predicted_from < s.local.input_ids.shape[1])).all()
        assert s.local.packing.seq_lens == part.packing.seq_lens and s.local.cells is part.cells


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    out = tmp_path_factory.mktemp("sequence")
    run_ranks(sequence_ranks.save_cases, sequence_ranks.NUM_RANKS, out)
    return [torch.load(out / f"rank{rank}.pt") for rank in range(sequence_ranks.NUM_RANKS)]


@pytest.fixture(scope="module")
def one():
    return sequence_ranks.cases()


@pytest.mark.slow
@pytest.mark.parametrize("case", sequence_ranks.HEADS)
def test_attention_and_its_gradients_are_those_of_one_process(ranks, one, case):
    for number, whole in enumerate(one[case]):
        shares = torch.cat([results[case][number] for results in ranks])
        torch.testing.assert_close(shares, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*sequence_ranks.SHAPES, "checkpointing", "without loss tokens"])
def test_a_models_figures_are_the_same_on_every_process_and_gradients_add_up(ranks, one, case):
    *figures, gradients = one[case]
    for results in ranks:
        for got, want in zip(results[case][:2], figures, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        assert all(map(torch.equal, results[case][:2], ranks[0][case][:2]))
    for name, want in gradients.items():
        total = sum(results[case][2][name] for results in ranks)
        torch.testing.assert_close(total, want, rtol=1e-4, atol=1e-5)
