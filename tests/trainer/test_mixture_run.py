"""configs/mixture.yaml: three environments in every batch, from demonstrations to a step of GRPO."""

import json

import pytest
from small_runs import BASE_MODEL, ROOT, metrics

from data_prep.mixture import write_mixture
from verl.trainer import fsdp_sft_trainer, main_ppo


@pytest.mark.slow
def test_three_environments_are_learnt_in_one_batch(serve_documents, tmp_path):
    data, start, run_dir = (tmp_path / name for name in ("data", "start", "run"))
    write_mixture(3, data, num_train=24, num_test=4, num_demonstrations=48)
    supervised = {
        "data.train_files": data / "sft_train.parquet",
        "model.partial_pretrain": BASE_MODEL,
        "trainer.default_local_dir": start,
        "trainer.device": "cpu",
    }
    layers = [f"@{ROOT / 'configs' / 'mixture_sft.yaml'}"]
    assert fsdp_sft_trainer.run([*layers, *(f"{key}={value}" for key, value in supervised.items())]) == 0
    documents = [json.loads(line) for line in (data / "corpus.jsonl").open(encoding="utf-8")]
    layers = [f"@{ROOT / 'configs' / 'mixture.yaml'}", f"@{data / 'settings.yaml'}"]
    with serve_documents(documents, topk=2) as address:
        settings = {
            "actor_rollout_ref.model.path": start / "huggingface",
            "retriever.url": f"{address}/retrieve",
            "data.train_batch_size": 6,
            "actor_rollout_ref.rollout.n_agent": 4,
            "actor_rollout_ref.actor.ppo_mini_batch_size": 24,
            "trainer.total_training_steps": 2,
            "trainer.default_local_dir": run_dir,
            "trainer.device": "cpu",
            "trainer.progress": "plain",
        }
        assert main_ppo.run([*layers, *(f"{key}={value}" for key, value in settings.items())]) == 0
    before, *steps = metrics(run_dir)
    assert len(steps) == 2
    for row in steps:
        for name in ("search", "gsm8k_multi_turn", "text2sql"):
            assert -1 <= row[f"env/{name}/reward"] <= 1.2 and row[f"env/{name}/turns"] >= 1
            assert row[f"env/{name}/failed"] == row[f"env/{name}/unverified"] == 0
        assert [row[f"data/{name}/share"] for name in ("search", "sums", "sql")] == [pytest.approx(1 / 3)] * 3
        assert row["env/left_out"] == 0 and row["actor/grad_norm"] > 0
    scored = ("microworld", "gsm8k_multi_turn", "text2sql")
    assert {f"val/test_score/{name}" for name in scored} <= set(before)
