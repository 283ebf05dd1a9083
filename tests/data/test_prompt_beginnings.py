"""A prompt begins with exactly one beginning of sequence, where the tokenizer puts one before documents."""

import pandas as pd
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from verl.config import load_sft_config
from verl.data.rl_dataset import RLHFDataset, cut_prompt, encode_prompt
from verl.data.sft_dataset import SFTDataset


@pytest.fixture(params=["<b>", ""], ids=["puts one before documents", "has one"])
def tokenizer(request):
    """One token for each byte; `opening` is what it puts before a document."""
    bpe = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<b>", eos_token="<e>")
    made.opening = request.param
    specials = [("<b>", made.bos_token_id)]
    if request.param:
        made.backend_tokenizer.post_processor = processors.TemplateProcessing("<b> $A", None, specials)
    return made


def test_training_prompts_have_one_also_when_they_are_cut_or_bring_it(tokenizer):
    config = {"truncation": "left", "max_prompt_length": 40, "max_start_length": 6}
    texts = ["who?", "<b>who?", "abcdefgh"]
    data = RLHFDataset(
        [{"prompt": t, "reward_model": {}, "data_source": "nq"} for t in texts], tokenizer, config
    )
    cut = "<b>defgh" if tokenizer.opening else "cdefgh"
    found = [tokenizer.decode(data[i]["raw_prompt_ids"]) for i in range(3)]
    assert found == [f"{tokenizer.opening}who?", "<b>who?", cut]


def test_a_chat_template_says_itself_what_stands_first(tokenizer):
    tokenizer.chat_template = "..."
    assert tokenizer.decode(encode_prompt(tokenizer, "who?")) == "who?"
    ids = encode_prompt(tokenizer, "<b>abcdefgh")
    assert tokenizer.decode(cut_prompt(tokenizer, ids, 4)) == ("<b>fgh" if tokenizer.opening else "efgh")
    assert cut_prompt(tokenizer, ids, 1) == (ids[:1] if tokenizer.opening else ids[-1:])
    assert cut_prompt(tokenizer, ids, len(ids)) == ids


def test_supervised_rows_begin_as_the_prompts_of_rollouts_do(tmp_path, tokenizer):
    rows = [{"question": "Who?", "answer": "Ada"}, {"question": "<b>Who?", "answer": "Ada"}]
    pd.DataFrame(rows).to_parquet(path := tmp_path / "rows.parquet")
    for settings, texts, trained_from in (
        ([], [f"{tokenizer.opening}Who?Ada<e>", "<b>Who?Ada<e>"], [4 + bool(tokenizer.opening), 5]),
        (
            ["max_length=6", "truncation=left"],
            ["<b>?Ada<e>" if tokenizer.opening else "o?Ada<e>"] * 2,
            [2, 2],
        ),
    ):
        config = load_sft_config([f"data.{setting}" for setting in settings]).data
        data = SFTDataset(str(path), tokenizer, config)
        assert [tokenizer.decode(ids) for ids in data.input_ids] == texts
        assert [each.tolist().index(True) for each in data.trained] == trained_from
