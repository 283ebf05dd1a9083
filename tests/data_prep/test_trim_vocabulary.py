"""A trimmed model cuts its texts as the whole one does, and has its log-probs over the words that stay."""

import json
import random
import re
from collections import Counter

import pandas as pd
import pytest
import torch
import transformers
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, GemmaTokenizer, LlamaTokenizer, Qwen2Tokenizer

from data_prep.trim_vocabulary import PROMPTS, choose, encoded, main, read_texts, trim_tokenizer

TEXTS = ["Tall ships sailed to Lisbon.\n\nWhy?", " Zoë:  who?\n\n\n<answer> Ünlü </answer>"]
OTHERS = ["A quick brown vixen;\tand 漢字 🎻 \n\n\n\n", "<search>ships</search>"]
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 256}


def make_tokenizer(kind, corpus, size):
    """A tokenizer that is trained on the corpus: byte-level, or of letters with ▁ and single bytes."""
    trained = Tokenizer(models.BPE())
    alphabet = []
    first = ["<unk>", "<s>", "</s>"]
    if kind is Qwen2Tokenizer:
        trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        first = []
    else:
        trained.normalizer = normalizers.Replace(" ", "▁")
        trained.pre_tokenizer = pre_tokenizers.Split(Regex("▁*[^▁\n]+|\n+"), "isolated")
        first = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"] if kind is GemmaTokenizer else first
        first += [f"<0x{i:02X}>" for i in range(256)]
    options = {"initial_alphabet": alphabet, "show_progress": False, "max_token_length": 9}
    trained.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=size, **options))
    bpe = json.loads(trained.to_str())["model"]
    vocab = {word: i for i, word in enumerate(first + sorted(bpe["vocab"], key=bpe["vocab"].get))}
    # Qwen's beginning of sequence is a placeholder here, which stays because it is named.
    names = {} if first else {"bos_token": "<|reserved_1|>", "eos_token": "<|end|>"}
    made = kind(
        vocab=vocab, merges=[tuple(pair) for pair in bpe["merges"]], add_bos_token=bool(first), **names
    )
    made.add_tokens(["<unused0>", "<unused1>", "<|im_start|>"], special_tokens=True)
    return made


@pytest.fixture(params=["gemma", "qwen, tied", "qwen, untied"])
def source(request, tmp_path):
    """A random model with a tokenizer of more words than the texts use."""
    rng = random.Random(1)
    folder = tmp_path / "whole"
    more = [" ".join("".join(rng.choices("kruvoaex", k=4)) for _ in range(3000))]
    kind = GemmaTokenizer
    make = transformers.Gemma3TextConfig
    if request.param != "gemma":
        kind = Qwen2Tokenizer
        make = transformers.Qwen2Config
    tokenizer = make_tokenizer(kind, [*TEXTS, *OTHERS, *PROMPTS, *more] * 3, 1500)
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    ids |= {"tie_word_embeddings": "untied" not in request.param, "vocab_size": len(tokenizer) + 20}
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(make(**SIZES, **ids))
    torch.nn.init.normal_(model.get_output_embeddings().weight, std=0.5)
    model.generation_config.max_new_tokens = 300
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "NOTICE.md").write_text("terms")
    return folder


def trim(source, out, *more):
    texts = out.parent / "texts.jsonl"
    texts.write_text("".join(json.dumps({"id": "never read", "question": text}) + "\n" for text in TEXTS))
    return main(["--model", str(source), "--texts", str(texts), "--out", str(out), *more])


def test_texts_are_cut_as_before_and_log_probs_are_those_of_the_whole_model(source, tmp_path, capsys):
    assert trim(source, tmp_path / "small") == 0, capsys.readouterr().err
    whole, small = (AutoTokenizer.from_pretrained(folder) for folder in (source, tmp_path / "small"))
    old, new = (AutoModelForCausalLM.from_pretrained(folder) for folder in (source, tmp_path / "small"))
    head = new.get_output_embeddings().weight
    embedding = new.get_input_embeddings().weight
    assert len(small) == len(head) == len(embedding) == new.config.vocab_size
    assert (head is embedding) == old.config.tie_word_embeddings
    assert len(small) % 64 == 0 and len(small) < len(whole) - 100
    kept = whole.convert_tokens_to_ids(small.convert_ids_to_tokens(range(len(small))))
    assert kept == sorted(kept) and "<unused1>" not in small.get_vocab()
    for text in [*TEXTS, *OTHERS]:
        assert small.decode(small(text).input_ids, skip_special_tokens=True) == text
    for text in TEXTS:
        ids = small(text).input_ids
        assert [kept[i] for i in ids] == whole(text).input_ids
        with torch.no_grad():
            expected = old(torch.tensor([[kept[i] for i in ids]])).logits[..., kept].log_softmax(-1)
            found = new(torch.tensor([ids])).logits.log_softmax(-1)
        assert expected.std() > 0.3
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    for config in (new.config, new.generation_config):
        assert kept[config.eos_token_id] == whole.eos_token_id == kept[small.eos_token_id]
        assert kept[config.bos_token_id] == whole.bos_token_id
    assert new.generation_config.max_new_tokens == 300
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small", "texts.jsonl", "whole"]
    assert (tmp_path / "small/NOTICE.md").read_text() == "terms"


def test_too_few_words_are_refused_with_the_number_that_is_enough(source, tmp_path, capsys):
    assert trim(source, tmp_path / "small", "--keep", "70") == 2
    needed = int(re.search(r"--keep 70: expected (\d+) or more", capsys.readouterr().err)[1])
    assert trim(source, tmp_path / "small", "--keep", str(needed - 1)) == 2
    assert trim(source, tmp_path / "small", "--keep", str(needed)) == 0
    assert len(AutoTokenizer.from_pretrained(tmp_path / "small")) == needed


@pytest.mark.parametrize("kind", [GemmaTokenizer, Qwen2Tokenizer, LlamaTokenizer])
def test_any_texts_are_cut_as_before_by_the_words_that_they_use(kind):
    for seed in range(12):
        rng = random.Random(seed)
        texts = ["".join(rng.choices("aab  \nbcdé", k=rng.randint(1, 60))) for _ in range(60)]
        whole = make_tokenizer(kind, texts, rng.randint(120, 400))
        some = texts[: rng.randint(1, 6)]
        tokenizer = json.loads(whole.backend_tokenizer.to_str())
        ids = choose(tokenizer, Counter(i for _, ids in encoded(whole, some) for i in ids), set(), None)
        small = Tokenizer.from_str(json.dumps(trim_tokenizer(tokenizer, ids)))
        for text, before in encoded(whole, some):
            assert small.encode(text, add_special_tokens=False).ids == [ids[i] for i in before]


def test_all_kinds_of_files_are_read(tmp_path):
    (tmp_path / "a.txt").write_text("plain")
    (tmp_path / "b.json").write_text(json.dumps({"data": [{"context": "deep", "n": 1, "id": "x"}]}))
    (tmp_path / "c.jsonl").write_text('{"title": "Porto", "text": "City."}\n{"contents": "Faro\\nSouth."}\n')
    pd.DataFrame({"prompt": [[{"role": "user", "content": "Who?"}]]}).to_parquet(tmp_path / "d.parquet")
    texts = list(read_texts(tmp_path / name for name in ("a.txt", "b.json", "c.jsonl", "d.parquet")))
    assert {"plain", "deep", " deep", "Porto", "Who?", " Who?"} <= set(texts) and "x" not in texts
    shown = "".join(text for text in texts if "<information>" in text)
    assert 'Doc 1(Title: "Porto") City.<' in shown and "Doc 1(Title: Faro) South.<" in shown


@pytest.mark.parametrize("source", ["gemma"], indirect=True)
def test_what_cannot_be_trimmed_is_named_and_nothing_is_written(source, tmp_path, capsys):
    for name in ("texts.csv", "bad.parquet"):
        (tmp_path / name).write_text("no")
    cases = [("whole", "none.txt", "is not there"), ("whole", "texts.csv", "expected a .txt, .json")]
    cases += [("", "texts.csv", "tokenizer.json is not there"), ("whole", "bad.parquet", "can't be read")]
    for folder, texts, error in cases:
        arguments = ["--model", str(tmp_path / folder), "--texts", str(tmp_path / texts)]
        assert main([*arguments, "--out", str(tmp_path / "small")]) == 2
        assert error in capsys.readouterr().err and not (tmp_path / "small").exists()
    words = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(source)
    assert trim(source, tmp_path / "small") == 2 and "WordLevel, expected BPE" in capsys.readouterr().err
    assert trim(source, tmp_path) == 2 and "is there already" in capsys.readouterr().err
