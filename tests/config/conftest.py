"""A run's files, as far as a configuration asks for them."""

import json

import pytest

SHAPE = {
    "model_type": "qwen3",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 100,
    "head_dim": 8,
}


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """A folder with train.parquet, test.parquet and a model that has its config.json alone."""
    folder = tmp_path_factory.mktemp("files")
    for name in ("train.parquet", "test.parquet"):
        (folder / name).write_bytes(b"PAR1")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(SHAPE))
    return folder


@pytest.fixture(scope="session")
def good(files) -> list[str]:
    """Settings of a valid GRPO run of one process."""
    return [
        f"data.train_files={files}/train.parquet",
        f"data.val_files={files}/test.parquet",
        f"actor_rollout_ref.model.path={files}/model",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n_agent=8",
        "data.train_batch_size=32",
    ]


@pytest.fixture(scope="session")
def good_sft(files) -> list[str]:
    """Settings of a valid supervised run."""
    return [
        f"data.train_files={files}/train.parquet",
        f"data.val_files={files}/test.parquet",
        f"model.partial_pretrain={files}/model",
    ]
