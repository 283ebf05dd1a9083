"""Checks of a run's settings and files, and of the Ray cluster: each finds its trouble."""

import json
import os
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from huggingface_hub import constants
from known_models import write_config
from preflight_cases import BASE_MODEL, TWO_NODES, TWO_ON_RAY, find, target_of
from safetensors.torch import save_file

from verl.preflight.__main__ import main
from verl.preflight.cluster import look_at_ray, versions
from verl.preflight.target import Cluster, RayNode, Target

ACTOR = "actor_rollout_ref.actor"
NODES = (RayNode("node1", "127.0.0.1", 64, 8, True), RayNode("node2", "10.0.0.2", 64, 8, True))
CLUSTER = Cluster("10.0.0.1:6379", nodes=NODES)
NO_GPUS = Cluster("a:1", nodes=(replace(NODES[0], num_gpus=0),))
LOST = Cluster("a:1", nodes=(replace(NODES[0], num_gpus=16), replace(NODES[1], is_alive=False)))
ON_GPUS = ("trainer.nnodes=2", "trainer.n_gpus_per_node=8", "trainer.device=cuda")
ROLLOUT = "actor_rollout_ref.rollout"
APART = ("trainer.n_gpus_per_node=8", f"{ROLLOUT}.placement=apart", f"{ROLLOUT}.num_processes=2")
SPLIT = (*APART, f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.tensor_model_parallel_size=2")
ELSEWHERE = (*APART, f"{ROLLOUT}.name=remote", f"{ROLLOUT}.remote.urls=['http://a:1','http://b:1']")


@pytest.mark.parametrize(
    ("check", "settings", "words"),
    [
        ("settings", ["data.max_start_length=2000"], "error: [settings] Found data.max_start_length=2000"),
        ("settings", ["data.train_files=/no/such.parquet"], "data.train_files=/no/such.parquet"),
        ("batches", ["data.train_batch_size=300"], "a step has 300 trajectories, no multiple"),
        ("batches", ["data.train_batch_size=300"], f"Do: {ACTOR}.ppo_mini_batch_size=150"),
        ("batches", ["trainer.n_gpus_per_node=3", *TWO_NODES], "updates of 256 trajectories for 6 replicas"),
        ("batches", ["algorithm.adv_estimator=gae", "critic.ppo_mini_batch_size=200"],
         "critic.ppo_mini_batch_size=200"),
        ("lengths", ["data.max_prompt_length=99999"], "knows 2048"),
        ("lengths", ["data.max_obs_length=4000"], "before it has read what its first search found"),
        ("hub-offline", ["actor_rollout_ref.model.path=Qwen/Qwen2.5-3B"], "hf download Qwen/Qwen2.5-3B"),
        ("ray-resources", ["trainer.device=cuda"], "asks for 1 GPUs, this machine has 0"),
    ],
)  # fmt: skip
def test_what_a_check_finds_in_the_settings(check, settings, words, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    (finding,) = find(check, target_of(*settings))
    assert words in finding.line


SOUND = "batches lengths hub-offline hub-reachable uv-hook model data memory checkpoints"


@pytest.mark.parametrize("check", SOUND.split())
def test_a_sound_run_has_no_findings(check, tmp_path):
    assert find(check, target_of(f"trainer.default_local_dir={tmp_path}")) == []


@pytest.fixture
def hub_that_is_away(monkeypatch):
    """A hub that refuses, and whose cache holds `Some/cached` alone; gives the variables of the process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free.getsockname()[1]}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "")  # what a test sets is taken back
    monkeypatch.setattr("verl.utils.hub.local_folder", {"Some/cached": BASE_MODEL}.get)
    return os.environ


def test_a_hub_that_does_not_answer_is_left_alone_where_the_models_are_cached(hub_that_is_away):
    (finding,) = find("hub-reachable", target_of("actor_rollout_ref.model.path=Some/cached", at_start=True))
    assert finding.level == "warning" and "does not answer (ConnectError)" in finding.what
    assert hub_that_is_away["HF_HUB_OFFLINE"] == "1" and constants.HF_HUB_OFFLINE
    assert find("hub-reachable", target_of("actor_rollout_ref.model.path=Some/cached")) == []  # asked no more


def test_a_hub_that_does_not_answer_for_a_model_that_is_nowhere_is_an_error(hub_that_is_away):
    (finding,) = find("hub-reachable", target_of("actor_rollout_ref.model.path=Some/other", at_start=True))
    assert finding.level == "error" and "hf download Some/other" in finding.line
    assert hub_that_is_away["HF_HUB_OFFLINE"] == "" and not constants.HF_HUB_OFFLINE


def test_workers_in_an_environment_of_uv_are_warned_of(monkeypatch):
    monkeypatch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "1")
    monkeypatch.setenv("RAY_RUNTIME_ENV_HOOK", "ray._private.runtime_env.uv_runtime_env_hook.hook")
    dos = [finding.do for finding in find("uv-hook", target_of())]
    assert dos == ["unset RAY_ENABLE_UV_RUN_RUNTIME_ENV", "unset RAY_RUNTIME_ENV_HOOK"]


def test_an_environment_that_is_not_there_is_named_from_the_settings_and_from_the_rows(tmp_path):
    for row, env_class, name in ({"env_class": "gsm9k"}, "search", "gsm8k"), ({}, "serch", "search"):
        path = tmp_path / f"{name}.parquet"
        pd.DataFrame([{"prompt": "a", **row}]).to_parquet(path)
        files = [f"data.{kind}_files={path}" for kind in ("train", "val")]
        (finding,) = find("settings", target_of(*files, f"environment.env_class={env_class}"))
        assert f"Did you mean {name!r}?" in finding.what


def rows_with(tmp_path: Path, question: str, suffix: str) -> list[str]:
    rows = [
        {
            "data_source": "own",
            "prompt": [{"role": "user", "content": f"Look it up.\nQuestion: {question}\n"}],
        }
    ]
    path = tmp_path / f"rows.{suffix}"
    frame = pd.DataFrame(rows)
    frame.to_parquet(path) if suffix == "parquet" else frame.to_json(path, orient="records", lines=True)
    return [f"data.train_files={path}", f"data.val_files={path}"]


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_questions_in_words_that_the_shipped_model_does_not_know_are_warned_of(tmp_path, suffix):
    files = rows_with(tmp_path, "Who wound the clock of the lighthouse in Edinburgh?", suffix)
    (finding,) = find("words", target_of(*files))
    assert finding.level == "warning" and "knows the names of the microworld alone" in finding.why
    assert "BASE_MODEL=" in finding.do
    assert find("words", target_of(*files, "do_search=false")) == []
    known = rows_with(tmp_path, "What is the birthplace of the director of Sleeping Hotel?", suffix)
    assert find("words", target_of(*known)) == []


def test_models_that_are_not_whole(tmp_path):
    def what(path: Path) -> str:
        (finding,) = find("model", target_of(f"actor_rollout_ref.model.path={path}"))
        return finding.what

    write_config(tmp_path, "7B")
    assert what(tmp_path).endswith("is not whole: no weights, tokenizer")
    (tmp_path / "tokenizer.json").touch()
    weights = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(100)}, weights)
    index = tmp_path / "model.safetensors.index.json"
    for text in ("{", "{}", '{"weight_map": []}'):
        index.write_text(text)
        assert "can't be read: model.safetensors.index.json: " in what(tmp_path)
    index.unlink()
    assert find("model", target_of(f"actor_rollout_ref.model.path={tmp_path}")) == []
    weights.write_bytes(weights.read_bytes()[:-10])
    assert "it was cut short" in what(tmp_path)
    weights.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")
    assert "git lfs pull" in what(tmp_path)
    save_file({"a": torch.zeros(100)}, weights)
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert what(tmp_path).endswith("no model-00001-of-00002.safetensors")


def test_data_that_is_no_parquet_file(tmp_path):
    (tmp_path / "train.parquet").write_text("version https://git-lfs.github.com/spec/v1\n")
    (finding,) = find("data", target_of(f"data.train_files={tmp_path}/train.parquet"))
    assert "git lfs pull" in finding.what


def test_wandb_without_a_key(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    target = target_of("trainer.logger=[console,wandb]")
    assert "export WANDB_API_KEY" in find("wandb-key", target)[0].do
    (tmp_path / "netrc").write_text("machine api.wandb.ai\n  login user\n  password secret\n")
    assert find("wandb-key", target) == []


# -------------------------------------------------------------------------------- memory at the start

H100_BYTES = 85_029_158_912  # torch.cuda.get_device_properties(0).total_memory of an "H100 80GB HBM3"


def on_one_h100(monkeypatch, folder: Path, *settings: str) -> Target:
    """`bash train_grpo.sh` with Qwen2.5-3B on a machine with one H100, by what its driver would say."""
    properties = SimpleNamespace(total_memory=H100_BYTES, name="NVIDIA H100 80GB HBM3")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: properties)
    lengths = ["data.max_prompt_length=4096", "data.max_start_length=2048", "data.train_batch_size=512"]
    shipped = [
        "actor_rollout_ref.rollout.n_agent=5",
        f"{ACTOR}.ppo_mini_batch_size=256",
        "trainer.device=cuda",
    ]
    model = ["actor_rollout_ref.model.enable_gradient_checkpointing=true"]
    path = f"actor_rollout_ref.model.path={write_config(folder, '3B')}"
    return target_of(*lengths, *shipped, *model, path, *settings)


def test_a_run_that_can_not_fit_its_gpu_is_refused_with_the_key(monkeypatch, tmp_path):
    (finding,) = find("memory", on_one_h100(monkeypatch, tmp_path, f"{ACTOR}.ppo_micro_batch_size=64"))
    assert finding.level == "error" and "the GPU would need" in finding.what
    assert 'in the phase "actor\'s update" and has 79.19' in finding.what
    assert f"{ACTOR}.use_dynamic_bsz=true" in finding.do and "below 64 trajectories" in finding.do
    assert finding.do.endswith("trainer.doctor_skip=[memory] starts it all the same")


def test_token_budgets_make_it_fit(monkeypatch, tmp_path):
    budgets = (
        f"{ACTOR}.use_dynamic_bsz=true",
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true",
        "actor_rollout_ref.ref.log_prob_use_dynamic_bsz=true",
    )
    monkeypatch.setattr("verl.planning.memory_plan.can_compile", lambda: True)
    assert find("memory", on_one_h100(monkeypatch, tmp_path, *budgets)) == []
    monkeypatch.setattr(
        "verl.planning.memory_plan.can_compile", lambda: False
    )  # without a compiler more is kept
    (finding,) = find("memory", on_one_h100(monkeypatch, tmp_path, *budgets))
    assert "80.26 GiB" in finding.what


def test_on_cpu_what_models_keep_for_good_is_compared_with_the_machine(monkeypatch, tmp_path):
    monkeypatch.setattr("verl.preflight.run_checks.memory_of_machine", lambda: 64 * 10**9)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    path = f"actor_rollout_ref.model.path={write_config(tmp_path, '7B')}"
    (finding,) = find("memory", target_of(path, "trainer.device=cpu", "algorithm.kl_ctrl.kl_coef=0"))
    assert "has 64.0 GB of memory" in finding.what and "need 121.8 GB" in finding.what
    cluster = replace(CLUSTER, nodes=NODES)  # its GPUs would hold it
    assert find("memory", target_of(path, "trainer.backend=ray", cluster=cluster)) == []
    monkeypatch.setattr("verl.preflight.run_checks.memory_of_machine", lambda: 130 * 10**9)
    (finding,) = find("memory", target_of(path, "trainer.device=cpu", "algorithm.kl_ctrl.kl_coef=0"))
    assert finding.level == "warning" and "need 121.8 GB, and a pass of" in finding.what


# -------------------------------------------------------------------------------- Ray


@pytest.mark.parametrize(
    ("check", "settings", "cluster", "words"),
    [
        ("ray-address", TWO_ON_RAY, Cluster("a:1", problem="a:1: nobody."), "[ray-address] a:1: nobody"),
        ("ray-address", TWO_ON_RAY, Cluster(None, ("b:1",)), "warning: [ray-address] RAY_ADDRESS is not set"),
        ("ray-address", TWO_NODES, Cluster(None, ("b:1",)), "error: [ray-address] RAY_ADDRESS is not set"),
        ("ray-address", TWO_NODES, Cluster(None), "trainer.nnodes=2, and RAY_ADDRESS is not set"),
        ("ray-resources", ["trainer.n_gpus_per_node=8"], Cluster(None),
         "the run asks for 8 GPUs, the Ray that it would start on this machine has 0"),
        ("ray-resources", ["trainer.n_gpus_per_node=8"], NO_GPUS,
         "the run asks for 8 GPUs, the cluster has 0"),
        ("ray-resources", SPLIT, NO_GPUS, "the run asks for 12 GPUs, the cluster has 0"),
        ("ray-resources", ELSEWHERE, NO_GPUS, "the run asks for 8 GPUs, the cluster has 0"),
        ("ray-resources", [*TWO_NODES, "trainer.n_gpus_per_node=300"], CLUSTER,
         "600 processes reserve 0.25 of Ray's CPUs each, the cluster has 128"),
        ("ray-resources", ON_GPUS, LOST,
         "the cluster has 1 nodes with 8 GPUs (node2 left it)"),
        ("driver-node", TWO_NODES, Cluster("10.0.0.2:6379", nodes=NODES[1:]), "is no node of the cluster"),
        ("nodes", TWO_NODES, replace(CLUSTER, silent=("node2",)), "the node node2 did not run"),
    ],
)  # fmt: skip
def test_what_a_check_finds_in_the_cluster(check, settings, cluster, words, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    (finding,) = find(check, target_of(*settings, cluster=cluster))
    assert words in finding.line


def test_a_sound_cluster_has_no_findings():
    target = target_of(*ON_GPUS, cluster=CLUSTER)
    assert [
        f for name in ("ray-address", "ray-resources", "driver-node", "nodes") for f in find(name, target)
    ] == []


def test_nodes_that_differ_are_named():
    on_nodes = {"node1": versions(), "node2": versions() | {"torch": "2.6.0"}}
    target = target_of(*ON_GPUS, cluster=CLUSTER, versions=on_nodes)
    (version,) = (finding.what for finding in find("nodes", target))
    assert version == f"torch is {torch.__version__} here and 2.6.0 on node2"


@pytest.mark.parametrize("folder", ["/tmp/" + "long" * 20, "/no/such/folder"])
def test_a_folder_that_ray_can_not_work_in(monkeypatch, folder):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", folder)
    (finding,) = find("ray-files", target_of(*TWO_ON_RAY, cluster=look_at_ray()))
    assert f"RAY_TMPDIR={folder}" in finding.what and finding.level == "error"


def test_supervised_runs_are_looked_at_by_their_own_settings(tmp_path):
    from verl.config import load_sft_config

    line = [f"model.partial_pretrain={BASE_MODEL}", "data.train_files=/no/such.parquet"]
    target = Target(load_sft_config(line))
    assert "/no/such.parquet" in find("settings", target)[0].what
    assert find("model", target) == [] and target.models == {"model.partial_pretrain": str(BASE_MODEL)}


def test_a_key_that_changes_nothing_is_named():
    files = [f"data.{kind}_files={__file__}" for kind in ("train", "val")]
    target = target_of(*files, "trainer.max_restarts=2")
    notes = [finding.what for finding in find("no-effect", target)]
    expected = "trainer.max_restarts=2 has no effect: the run is one process"
    assert any(note.startswith(expected) for note in notes) or "parquet" in find("settings", target)[0].what


@pytest.mark.parametrize("program", [["retriever.timeout=0.3"], ["--config-name", "sft_trainer"]])
def test_settings_without_a_model_are_a_finding(program, capsys):
    assert main([*program, "trainer.seed=1"]) == 2
    assert "error: [settings]" in capsys.readouterr().out
