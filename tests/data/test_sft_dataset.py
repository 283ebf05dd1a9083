"""Supervised rows: which tokens are trained in each of the three forms, and what is said of bad rows."""

import re

import pandas as pd
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, tokenization_utils_base

from verl.config import load_sft_config
from verl.data.sft_dataset import SFTDataset

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}:{{ m.content }}<e>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


@pytest.fixture
def tokenizer():
    """One token for each byte; <s> and <e> are special, <e> ends a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="<e>")


def dataset(tmp_path, tokenizer, rows, *overrides):
    path = tmp_path / "rows.parquet"
    pd.DataFrame(rows).to_parquet(path)
    return SFTDataset(str(path), tokenizer, load_sft_config(list(overrides)).data)


def pieces(data, tokenizer, row=0):
    """(text, trained) runs of a row."""
    result: list[tuple[str, bool]] = []
    for token, trained in zip(data.input_ids[row].tolist(), data.trained[row].tolist(), strict=True):
        text = tokenizer.decode([token])
        if result and result[-1][1] == trained:
            result[-1] = (result[-1][0] + text, trained)
        else:
            result.append((text, trained))
    return result


def test_of_prompt_and_response_the_response_and_its_end_are_trained(tmp_path, tokenizer):
    data = dataset(tmp_path, tokenizer, [{"question": "Who?", "answer": "Ada"}])
    assert pieces(data, tokenizer) == [("Who?", False), ("Ada<e>", True)]


def test_a_prompt_goes_through_the_chat_template_as_in_a_rollout(tmp_path, tokenizer):
    tokenizer.chat_template = TEMPLATE
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]
    for question, begins in ((prompt, "<s>system:Be brief.<e>\n<s>user:"), ("Who?", "<s>user:")):
        data = dataset(tmp_path, tokenizer, [{"question": question, "answer": "Ada"}])
        assert pieces(data, tokenizer) == [(f"{begins}Who?<e>\n<s>assistant:", False), ("Ada<e>", True)]


def test_of_a_conversation_what_the_assistant_writes_is_trained(tmp_path, tokenizer):
    tokenizer.chat_template = TEMPLATE
    messages = [
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": "search"},
        {"role": "tool", "content": "Ada."},
        {"role": "assistant", "content": "wrong", "trained": False},
        {"role": "user", "content": "No."},
        {"role": "assistant", "content": "Ada"},
        {"role": "user", "content": "Thanks."},
    ]
    data = dataset(tmp_path, tokenizer, [{"messages": messages}], "data.multiturn.enable=true")
    assert pieces(data, tokenizer) == [
        ("<s>user:Who?<e>\n<s>assistant:", False),
        ("search<e>", True),
        ("\n<s>tool:Ada.<e>\n<s>assistant:wrong<e>\n<s>user:No.<e>\n<s>assistant:", False),
        ("Ada<e>", True),
    ]


def test_a_template_that_changes_earlier_text_is_refused(tmp_path, tokenizer):
    tokenizer.chat_template = "{{ messages | length }}" + TEMPLATE
    messages = [{"role": r, "content": "x"} for r in ("user", "assistant", "user", "assistant")]
    with pytest.raises(ValueError, match="changes earlier text when message 1"):
        dataset(tmp_path, tokenizer, [{"messages": messages}], "data.multiturn.enable=true")


def test_the_template_sees_tools_and_further_arguments(tmp_path, tokenizer):
    tokenizer.chat_template = "{{ tools | length }}{{ enable_thinking }}{{ tone }}" + TEMPLATE
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    row = {"messages": messages, "tools": '[{"name": "a"}, {"name": "b"}]', "enable_thinking": True}
    flags = ("data.multiturn.enable=true", "data.apply_chat_template_kwargs={tone: dry}")
    assert pieces(dataset(tmp_path, tokenizer, [row], *flags), tokenizer)[0][0].startswith("2Truedry<s>user")


@pytest.mark.parametrize(
    "segments",
    [
        [("Who?\n", False), ("<search> q</search>", True), ("\n\ndocs\n\n", False), ("Ada", True)],
        [
            ("Who?\n", "user"),
            ("<search> q</search>", "assistant"),
            ("\n\ndocs\n\n", "tool"),
            ("Ada", "assistant"),
        ],
    ],
)
def test_of_pieces_the_marked_ones_are_trained_and_each_is_tokenised_alone(tmp_path, tokenizer, segments):
    marked = [
        {"text": t, "trained": m} if isinstance(m, bool) else {"content": t, "role": m} for t, m in segments
    ]
    data = dataset(tmp_path, tokenizer, [{"s": marked}], "data.segments_key=s")
    assert pieces(data, tokenizer) == [
        ("Who?\n", False),
        ("<search> q</search>", True),
        ("\n\ndocs\n\n", False),
        ("Ada<e>", True),
    ]


def test_observations_are_never_trained_whatever_holds_them(tmp_path, tokenizer):
    response = "<search> q</search>\n\n<information>Doc 1\n</information>\n\n<answer> Ada</answer>"
    data = dataset(tmp_path, tokenizer, [{"question": "Who?", "answer": response}])
    assert pieces(data, tokenizer) == [
        ("Who?", False),
        ("<search> q</search>", True),
        ("\n\n<information>Doc 1\n</information>\n\n", False),
        ("<answer> Ada</answer><e>", True),
    ]
    data = dataset(
        tmp_path, tokenizer, [{"question": "Who?", "answer": response}], "data.observation_tag=null"
    )
    assert pieces(data, tokenizer)[1] == (response + "<e>", True)


def test_long_rows_are_refused_or_cut_and_the_first_token_kept_is_not_trained(tmp_path, tokenizer):
    rows = [{"question": "0123456789", "answer": "abcde"}, {"question": "Q" * 30, "answer": "z"}]
    with pytest.raises(ValueError, match="2 of 2 rows.*rows.parquet, row 0: 16 tokens.*data.max_length=8"):
        dataset(tmp_path, tokenizer, rows, "data.max_length=8")
    left = dataset(tmp_path, tokenizer, rows, "data.max_length=4", "data.truncation=left")
    assert pieces(left, tokenizer) == [("c", False), ("de<e>", True)]
    right = dataset(tmp_path, tokenizer, rows, "data.max_length=12", "data.truncation=right")
    assert pieces(right, tokenizer) == [("0123456789", False), ("ab", True)]
    assert (len(right), right.num_cut_away) == (1, 1)  # of the second row nothing to train is left
    with pytest.raises(ValueError, match="no rows that data.max_length=2 leaves anything to train of"):
        dataset(tmp_path, tokenizer, rows, "data.max_length=2", "data.truncation=right")


def test_a_batch_is_padded_on_the_right_and_names_its_rows(tmp_path, tokenizer):
    rows = [{"question": "Who is it?", "answer": "Ada"}, {"question": "a", "answer": "b"}]
    batch = dataset(tmp_path, tokenizer, rows).batch([1, 0])
    tensors = batch.tensors
    assert tensors["attention_mask"].sum(1).tolist() == [3, 14]
    assert tensors["response_mask"][0].tolist() == [0, 1, 1] + [0] * 11
    assert tensors["position_ids"][0, :3].tolist() == [0, 1, 2]
    assert tensors["position_ids"][1].tolist() == list(range(14))
    assert batch.non_tensor_batch["uid"].tolist() == ["rows.parquet, row 1", "rows.parquet, row 0"]


PAIR = {"question": "Who?", "answer": "Ada"}
BAD = [
    ([], {"question": "Who?", "answer": ""}, "nothing in it is trained"),
    ([], {"question": "", "answer": "Ada"}, "nothing before it"),
    ([], {"question": None, "answer": "Ada"}, "question holds None"),
    (["data.prompt_dict_keys=[q]"], PAIR, "question holds 'Who?', without 'q'"),
    (["data.segments_key=s"], {"s": []}, "s holds"),
    (["data.segments_key=s"], {"s": [{"text": "a", "trained": False}]}, "nothing in it is trained"),
    (["data.segments_key=s"], {"s": [{"text": "a", "trained": True}]}, "nothing before it"),
    (["data.segments_key=s"], {"s": [{"text": None, "trained": True}]}, "piece 0 of s has the text None"),
    (["data.segments_key=s"], {"s": [{"text": "a", "mark": 1}]}, "neither trained nor role"),
    (["data.segments_key=s"], {"s": [{"text": "a", "trained": "yes"}]}, "expected true or false"),
]


@pytest.mark.parametrize(("flags", "row", "words"), BAD)
def test_a_bad_row_is_named_with_what_is_wrong(tmp_path, tokenizer, flags, row, words):
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        dataset(tmp_path, tokenizer, [row], *flags)
    assert "Found 1 of 1 rows" in str(error.value) and "rows.parquet, row 0" in str(error.value)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([{"role": "assistant", "content": "x"}], "begins with the assistant"),
        ([{"role": "user", "content": "x"}], "nothing in it is trained"),
        ([{"who": "user", "content": "x"}], "expected {role, content}"),
        ([{"role": "user", "content": None}], "message 0 of messages has the content None"),
        ([{"role": "critic", "content": "x"}, {"role": "assistant", "content": "y"}], "no critics here"),
    ],
)
def test_a_bad_conversation_is_named_with_what_is_wrong(tmp_path, tokenizer, messages, words):
    refusal = "{% if messages[0].role == 'critic' %}{{ raise_exception('no critics here') }}{% endif %}"
    tokenizer.chat_template = refusal + TEMPLATE
    with pytest.raises(ValueError, match=re.escape(words)):
        dataset(tmp_path, tokenizer, [{"messages": messages}], "data.multiturn.enable=true")


def test_a_template_that_fails_in_any_way_names_the_row(tmp_path, tokenizer):
    tokenizer.chat_template = "{{ messages[0].content + 1 }}"
    with pytest.raises(ValueError, match="rows.parquet, row 0: TypeError"):
        dataset(tmp_path, tokenizer, [PAIR])


def test_a_message_that_only_calls_tools_is_named(tmp_path, tokenizer):
    call = {"role": "assistant", "tool_calls": [{"name": "f"}]}
    with pytest.raises(ValueError, match="row 0: Found no text in message 0"):
        dataset(tmp_path, tokenizer, [PAIR | {"answer": [call]}])


def test_a_token_beyond_the_models_vocabulary_is_named(tmp_path, tokenizer):
    size = len(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "Who?", "answer": "Ada"}\n{"question": "<image>Who?", "answer": "Ada"}\n')
    data_config = load_sft_config([]).data
    with pytest.raises(ValueError, match=f"line 2: found the token '<image>' .* ids below {size}, the size"):
        SFTDataset(str(path), tokenizer, data_config, size)
    assert len(SFTDataset(str(path), tokenizer, data_config, size + 1)) == 2


def test_a_text_too_long_for_the_model_shows_no_warning_of_indexing_errors(tmp_path, tokenizer, monkeypatch):
    shown = []
    monkeypatch.setattr(tokenization_utils_base.logger, "warning", lambda text, *_: shown.append(text))
    tokenizer.model_max_length = 3
    dataset(tmp_path, tokenizer, [{"question": "who wrote it?", "answer": "she"}])
    assert shown == []


def test_of_a_parquet_file_only_the_columns_that_are_needed_are_read(tmp_path, tokenizer, monkeypatch):
    read = pq.read_table
    given = []
    monkeypatch.setattr(
        pq, "read_table", lambda *args, columns: given.append(columns) or read(*args, columns=columns)
    )
    tokenizer.chat_template = TEMPLATE
    messages = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Ada"}]
    row = {"question": "Who?", "answer": "Ada", "scores": [0.5] * 9, "messages": messages, "tools": "[]"}
    dataset(tmp_path, tokenizer, [row])
    dataset(tmp_path, tokenizer, [row], "data.multiturn.enable=true")
    assert given == [["question", "answer"], ["messages", "tools"]]
