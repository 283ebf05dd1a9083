"""Parts of models on Megatron over 1, 2 and 3 processes."""

import json
from types import SimpleNamespace

import megatron_checks as checks
import pytest
import torch
from megatron_ranks import write_models
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

pytestmark = [pytest.mark.megatron, pytest.mark.slow]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("models"))


def test_log_probs_of_a_shared_vocabulary_are_those_of_the_whole():
    run_ranks(checks.log_probs, 3, 4, 0.7)
    run_ranks(checks.log_probs, 1, None, 1.0)


def test_a_rank_reads_its_own_slices_alone_from_a_folder_of_several_files(folders, tmp_path):
    tensors = load_file(f"{folders['qwen3 untied']}/model.safetensors")
    names = sorted(tensors)
    for number in range(2):
        save_file({n: tensors[n].contiguous() for n in names[number::2]}, tmp_path / f"{number}.safetensors")
    weight_map = {name: f"{number}.safetensors" for number in range(2) for name in names[number::2]}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with open(f"{folders['qwen3 untied']}/config.json") as config:
        (tmp_path / "config.json").write_text(config.read())
    run_ranks(checks.own_slices, 2, str(tmp_path))


def test_rotary_angles_are_made_on_the_device_of_the_tokens():
    from verl.workers.megatron.model import _Stage

    rotary = LlamaRotaryEmbedding(LlamaConfig(hidden_size=32, num_attention_heads=4)).to("meta")
    stage = SimpleNamespace(
        config=SimpleNamespace(params_dtype=torch.bfloat16),
        rotary=rotary,
        pre_process=False,
        decoder=lambda packed_seq_params, **_: packed_seq_params.cos,
    )
    ids = torch.zeros(1, 3, dtype=torch.int64, device="meta")
    cos = _Stage._hidden_states(stage, SimpleNamespace(input_ids=ids, position_ids=ids, packing=None), None)
    assert cos.device.type == "meta" and cos.shape == (3, 8) and cos.dtype == torch.bfloat16
