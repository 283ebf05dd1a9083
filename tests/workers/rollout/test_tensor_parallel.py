"""One engine over two processes: the same calls in both, each gets its own prompts' trajectories."""

import mirrored_ranks
import pytest
import torch

from verl.protocol import DataProto
from verl.single_controller.base.worker import get_free_port


@pytest.mark.slow
def test_all_processes_make_the_leaders_calls_and_each_gets_its_own_rows(tmp_path):
    torch.multiprocessing.spawn(mirrored_ranks.rank_main, (2, get_free_port(), tmp_path), nprocs=2)
    first, second = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in range(2))
    prompts = DataProto.concat([mirrored_ranks.prompts_of(rank) for rank in range(2)])
    alone = mirrored_ranks.two_turns(mirrored_ranks.make_engine(), prompts).tensors["responses"]
    assert torch.equal(torch.cat([first["responses"], second["responses"]]), alone)
    assert len(first["responses"]) == 2 and len(second["responses"]) == 3
    assert first["counts"] == second["counts"] and first["counts"]["parked"] == 0
    assert first["counts"]["generated_tokens"] == 5 * 2 * mirrored_ranks.NEW_TOKENS
    assert first["meta_info"] == {"metrics": {"rows": 5}} and second["meta_info"] == {}
    assert first["error"] == "ValueError('no such thing')"
    assert "rank 0, which leads this engine, failed: ValueError" in second["error"]
