"""Parts of models on Megatron over 1, 2 and 3 processes."""

import json

import megatron_checks as checks
import pytest
from megatron_ranks import run_ranks, write_models
from safetensors.torch import load_file, save_file

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
