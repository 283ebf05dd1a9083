"""Supervised updates: the loss is what a plain loop in float64 says, for every way of splitting the rows."""

import pytest
import torch
from tiny_training import VOCABULARY, assert_same_gradients, gradients_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl.config import load_sft_config
from verl.protocol import DataProto
from verl.single_controller.base import ClassWithInitArgs
from verl.single_controller.local import LocalWorkerGroup
from verl.workers.sft_worker import SFTWorker


@pytest.fixture
def make_worker(model_path):
    """make_worker(*overrides): a worker in this process with the tiny model."""
    groups = []

    def make(*overrides, total_steps=10):
        config = load_sft_config(
            [f"model.partial_pretrain={model_path}", "trainer.device=cpu", "optim.lr=0.01", *overrides]
        )
        tokenizer = AutoTokenizer.from_pretrained(model_path)
        group = LocalWorkerGroup(ClassWithInitArgs(SFTWorker, config, tokenizer, total_steps))
        group.init_model()
        groups.append(group)
        return group._worker

    yield make
    for group in groups:
        group.shutdown()


def make_rows(seed=0, num_rows=7, width=20):
    """Rows of several turns: runs of trained tokens with others between them and behind them.

    Three rows begin alike, trained tokens among that: a pack holds those once, but each row's count.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(6, width + 1, (num_rows,), generator=generator)
    columns = torch.arange(width)
    attention = (columns < lengths[:, None]).long()
    trained = (torch.rand(num_rows, width, generator=generator) < 0.5) & (columns > 1) & (columns < 17)
    ids = torch.randint(2, VOCABULARY, (num_rows, width), generator=generator)
    ids[1:3, :6] = ids[0, :6]
    trained[:3, 2:5] = True
    return DataProto.from_dict(
        {
            "input_ids": ids * attention,
            "attention_mask": attention,
            "position_ids": (attention.cumsum(1) - 1) * attention,
            "response_mask": trained.long() * attention,
        }
    )


def plain_loss(model_path, data, dtype=torch.float64):
    """Summed negative log-likelihood of the trained tokens, row by row with Hugging Face's own forward pass,
    their number, and the gradient of the mean by parameter."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype)
    total = torch.zeros((), dtype=dtype)
    count = 0
    for row in range(len(data)):
        length = int(data.tensors["attention_mask"][row].sum())
        ids = data.tensors["input_ids"][row, :length]
        log_probs = model(ids[None]).logits[0].log_softmax(-1)
        for t in range(1, length):
            if data.tensors["response_mask"][row, t]:
                total = total - log_probs[t - 1, ids[t]]
                count += 1
    (total / count).backward()
    gradients = {f"model.{name}": p.grad.float() for name, p in model.named_parameters()}
    return total.item(), count, gradients


VARIANTS = {
    "at once": [],
    "rows of 1": ["data.micro_batch_size_per_gpu=1"],
    "3 rows": ["data.micro_batch_size=3"],
    "token budget": ["data.max_token_len_per_gpu=25"],
    "padded": ["use_remove_padding=false", "data.micro_batch_size_per_gpu=2"],
    "recomputed": ["model.enable_gradient_checkpointing=true"],
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_and_gradient_are_those_of_a_plain_float64_loop_however_rows_are_split(
    make_worker, model_path, variant
):
    data = make_rows()
    total, count, expected = plain_loss(model_path, data)
    worker = make_worker(*VARIANTS[variant])
    measured = worker.evaluate(data).meta_info["metrics"]
    assert measured["tokens"] == count
    assert measured["nll"] == pytest.approx(total, rel=1e-6)
    result, (gradients,) = gradients_of(worker.engine, lambda: worker.update(data))
    assert result.meta_info["metrics"]["train/loss"] == pytest.approx(total / count, rel=1e-6)
    assert_same_gradients(gradients, expected)


def test_an_update_that_is_not_finite_is_skipped_and_says_in_which_row(make_worker, caplog):
    worker = make_worker()
    data = make_rows()
    data.non_tensor_batch["uid"] = torch.arange(len(data)).numpy().astype(object)
    weights = worker.engine.module.model.get_input_embeddings().weight
    with torch.no_grad():
        weights[data.tensors["input_ids"][3, 0]] = float("nan")
    before = worker.engine.weights_version
    metrics = worker.update(data).meta_info["metrics"]
    assert metrics["train/num_skipped_updates"] == metrics["train/num_skipped_in_a_row"] == 1
    assert worker.engine.weights_version == before
    assert "the loss is not finite, that of row" in caplog.text


def test_a_checkpoint_goes_on_to_the_same_weights_and_is_a_model_too(make_worker, tmp_path, model_path):
    first = make_worker()
    data = make_rows()
    first.update(data)
    first.save_checkpoint(str(tmp_path))
    first.update(data)
    second = make_worker()
    second.load_checkpoint(str(tmp_path))
    second.update(data)
    for (name, left), (_, right) in zip(first.engine.weights(), second.engine.weights(), strict=True):
        assert torch.equal(left, right), name
    saved = tmp_path / "huggingface"
    assert AutoTokenizer.from_pretrained(saved).get_vocab()
    assert (saved / "prompt_template.txt").read_text() == "Question: {question}\n"
    total, count, _ = plain_loss(saved, data, torch.float32)
    assert total / count < plain_loss(model_path, data, torch.float32)[0] / count


def test_adapters_are_trained_alone_and_merged_into_what_is_saved(make_worker, tmp_path, model_path):
    worker = make_worker("model.lora_rank=2", "optim.lr=0.1")
    data = make_rows()
    names = [name for name, p in worker.engine.module.named_parameters() if p.requires_grad]
    assert names and all("lora_" in name for name in names)
    for _ in range(5):
        worker.update(data)
    measured = worker.evaluate(data).meta_info["metrics"]["nll"]
    worker.save_checkpoint(str(tmp_path))
    assert plain_loss(tmp_path / "huggingface", data)[0] == pytest.approx(measured, rel=1e-5)
    assert measured < plain_loss(model_path, data)[0]
