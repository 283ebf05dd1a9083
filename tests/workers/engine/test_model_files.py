"""What a model is, is decided once, from the files; disagreement with config.json is one line."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from verl.workers.engine import checkpoint
from verl.workers.engine.checkpoint import save_tensors, tensor_names, write_hf_folder
from verl.workers.engine.loading import load_hf_config, load_policy
from verl.workers.engine.model_files import ModelFiles
from verl.workers.rollout.native.architecture import ModelSpec

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models") / "tied"
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(model_folder, tmp_path):
    return shutil.copytree(model_folder, tmp_path / "model")


def edit(folder, **fields):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


def rewrite(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def read(folder):
    return load_hf_config({"path": str(folder)})


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"vocab_size": 104}, r"found 40 rows in model\.embed_tokens\.weight; expected vocab_size=104"),
        ({"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}, "found 2 layers; expected .*=3"),
        ({"num_hidden_layers": 1, "layer_types": ["full_attention"]}, "found 2 layers; expected .*=1"),
        ({"hidden_size": 32}, "found 16 columns in .*; expected hidden_size=32"),
    ],
)
def test_files_of_another_shape_than_the_configuration_are_one_line(folder, fields, expected):
    edit(folder, **fields)
    with pytest.raises(ValueError, match=expected) as caught:
        read(folder)
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


def test_an_external_lib_that_can_not_be_imported_is_one_line(folder, tmp_path, monkeypatch):
    (tmp_path / "broken_library.py").write_text("x = 1\nraise RuntimeError('not today')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, reason in (("no_such_library", "ModuleNotFoundError"), ("broken_library", "not today .*py:2")):
        with pytest.raises(ValueError, match=f"model.external_lib={name}, which can't be imported.*{reason}"):
            load_hf_config({"path": str(folder), "external_lib": name})


def test_a_matrix_of_another_shape_is_one_line_too(folder):
    edit(folder, intermediate_size=48)
    with pytest.raises(
        ValueError, match=r"mlp\.down_proj\.weight has shape \[16, 24\], expected \[16, 48\]"
    ) as caught:
        load_policy({"path": str(folder)}, torch.float32)
    assert "\n" not in str(caught.value)


def test_a_head_that_is_not_the_embedding_is_the_models_head_everywhere(folder, capsys):
    rewrite(folder, lambda weights: weights.update({HEAD: weights[EMBEDDING] * 2}))
    config = read(folder)
    assert not config.tie_word_embeddings and HEAD in ModelSpec.from_config(config).parameter_shapes()
    model = load_policy({"path": str(folder)}, torch.float32).model
    embedding = model.get_input_embeddings().weight
    assert torch.equal(model.get_output_embeddings().weight, 2 * embedding)
    assert capsys.readouterr().out.count("tie_word_embeddings=True: the files decide") == 1  # once only
    model.save_pretrained(folder / "again")
    assert json.loads((folder / "again" / "config.json").read_text())["tie_word_embeddings"] is False


def test_a_second_copy_of_the_embedding_is_no_head(folder):
    rewrite(folder, lambda weights: weights.update({HEAD: weights[EMBEDDING].clone()}))
    assert read(folder).tie_word_embeddings


def test_a_model_without_a_head_has_the_embedding_as_its_head(folder, capsys):
    edit(folder, tie_word_embeddings=False)
    assert read(folder).tie_word_embeddings
    model = load_policy({"path": str(folder)}, torch.float32).model
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert "has no lm_head.weight" in capsys.readouterr().out


def test_an_index_and_a_single_file_are_not_taken_for_one_model(folder):
    weights = load_file(folder / "model.safetensors")
    save_file(weights, folder / "model-00001-of-00001.safetensors", {"format": "pt"})
    index = {"weight_map": dict.fromkeys(weights, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"Found .*model\.safetensors beside"):
        read(folder)
    (folder / "model.safetensors").unlink()
    assert read(folder).vocab_size == 40
    (folder / "model-00001-of-00001.safetensors").unlink()
    with pytest.raises(ValueError, match="names model-00001-of-00001.safetensors, which is missing"):
        read(folder)


@pytest.mark.parametrize("damage", ["cut", "flipped header"])
def test_a_damaged_file_is_named(folder, damage):
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[3] ^= 0x80
    path.write_bytes(content[:-100] if damage == "cut" else content)
    with pytest.raises(ValueError, match=r"model\.safetensors can't be read"):
        read(folder)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("whole", [True, False])
def test_a_checkpoint_has_the_dtype_of_its_model_folder(folder, tmp_path, dtype, whole):
    rewrite(folder, lambda weights: weights.update({name: x.to(dtype) for name, x in weights.items()}))
    edit(folder, dtype=str(dtype).removeprefix("torch."))
    assert ModelFiles.read(folder).dtype == dtype
    policy = load_policy({"path": str(folder)}, torch.float32)
    assert next(policy.parameters()).dtype == torch.float32
    save_tensors({"model": dict(policy.state_dict())}, tmp_path / "actor" / "dcp")
    names = tensor_names(policy.model)
    weights = {name: x.detach() for name, x in policy.model.named_parameters()} if whole else names
    target = tmp_path / "huggingface"
    write_hf_folder(policy.model, weights, target, None, folder, tmp_path / "actor")
    assert {x.dtype for x in load_file(target / "model.safetensors").values()} == {dtype}
    assert json.loads((target / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    again = load_policy({"path": str(target)}, torch.float32)
    for name, parameter in policy.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter), name
    assert (
        checkpoint.saved_tensors(tmp_path / "actor" / "dcp", "model.model.")[EMBEDDING].dtype == torch.float32
    )
