"""What a user reads who asks for vLLM where it can't run."""

from __future__ import annotations

import sys

import pytest
import torch

from verl.workers.rollout.vllm.colocated_engine import VllmEngine


def start() -> None:
    VllmEngine("some/model", max_num_seqs=4, max_model_len=64, dtype=torch.float32)


def test_missing_vllm_is_said_in_one_line_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(
        ValueError, match=r"not installed: .* -m pip install -c constraints-vllm.txt -e '.\[vllm\]' .*CPU"
    ) as error:
        start()
    assert "\n" not in str(error.value)


def test_an_environment_that_sets_vllm_up_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with pytest.raises(ValueError, match="VLLM_ENABLE_V1_MULTIPROCESSING=1 .* needs 0"):
        start()
