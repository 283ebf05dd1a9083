"""The memory plan: who goes where, what fits, what a dry run prints; its accuracy against a real update."""

from pathlib import Path

import pytest
import torch
from known_models import NUM_PARAMETERS, search_r1_settings, write_config, write_small
from preflight_cases import BASE_MODEL

from verl.planning.memory_plan import (
    GIB,
    PROCESS_BYTES,
    DeviceLoad,
    Hardware,
    Plan,
    gib,
    report,
    rows_of_step,
    taken_beside_rollouts,
    verdict,
)
from verl.trainer import main_ppo
from verl.trainer.config import load_config
from verl.workers.engine.loading import load_hf_config
from verl.workers.rollout.build import EngineRequest, _kv_bytes, sequences_at_once
from verl.workers.rollout.native.architecture import ModelSpec

H80 = Hardware("cuda", 80 * GIB, "80 GB")
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
SEVEN = NUM_PARAMETERS["7B"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return {size: write_config(tmp_path_factory.mktemp(size), size) for size in ("7B", "72B")}


def plan_of(folder: Path, estimator: str, *settings: str, hardware: Hardware = H80) -> tuple[Plan, list[str]]:
    """The plan, and the lines that a dry run prints about it."""
    config = load_config([*search_r1_settings(folder, estimator), *settings])
    plan = Plan(config, hardware)
    return plan, [*report(plan), *verdict(plan)]


def gib_of(load: DeviceLoad, name: str) -> float:
    return max(load.items[name].values()) / GIB


def test_a_bound_on_the_step_takes_a_copy_of_the_weights_that_is_there_when_activations_are_gone(models):
    eight = "trainer.n_gpus_per_node=8"
    small = f"{ACTOR}.ppo_micro_batch_size_per_gpu=1"
    short = "data.max_prompt_length=256", "data.max_start_length=128"
    (without,) = plan_of(models["7B"], "grpo", eight, small, *short)[0].loads
    (bounded,) = plan_of(models["7B"], "grpo", eight, small, *short, f"{ACTOR}.max_step_kl=0.01")[0].loads
    name = "actor: copy of the weights before a step"
    assert name not in without.items
    activations = gib_of(bounded, "actor: activations") + gib_of(bounded, "actor: chunk of logits")
    assert gib_of(bounded, name) <= 4 * SEVEN / 8 / GIB
    assert gib_of(bounded, name) + activations >= 4 * SEVEN / 8 / GIB * 0.999


def test_ppo_of_7b_fits_on_8_gpus_of_80_gb(models):
    plan, lines = plan_of(models["7B"], "gae", "trainer.n_gpus_per_node=8")
    assert plan.fits and lines[-1].startswith("fits: each of the 8 GPUs has ")
    assert "processes: 1 x 8, FSDP2; each: actor_rollout_ref, critic" in lines
    (load,) = plan.loads
    assert gib_of(load, "actor: weights") == pytest.approx(4 * SEVEN / 8 / GIB, rel=1e-3)
    assert gib_of(load, "actor: optimizer state") == pytest.approx(8 * SEVEN / 8 / GIB, rel=1e-3)
    assert gib_of(load, "reference: weights") == pytest.approx(2 * SEVEN / 8 / GIB, rel=1e-3)
    assert gib_of(load, "rollout: weights of its own") == pytest.approx(2 * SEVEN / GIB, rel=1e-3)
    copied = 2 * 12 * SEVEN / 8  # of actor and critic: weights and two averages
    assert load.host_bytes == pytest.approx(copied + PROCESS_BYTES, rel=0.05)  # the critic has no large head
    text = "\n".join(lines)
    for column in ("rollout", "log-probs", "reference", "values", "critic's update", "actor's update"):
        assert column in text


@pytest.mark.parametrize("sleeps", ["true", "false"])
@pytest.mark.parametrize("size", [64, 80, 140])
def test_rollouts_take_what_training_leaves_of_a_gpu_and_a_run_takes_what_the_plan_says(
    size, sleeps, models, monkeypatch
):
    name = "actor_rollout_ref.rollout.name=native"
    lengths = "data.max_prompt_length=4096"
    settings = ("trainer.n_gpus_per_node=8", name, lengths, f"{ROLLOUT}.free_cache_engine={sleeps}")
    smaller = [f"{ACTOR}.fsdp_config.optimizer_offload=true", f"{ACTOR}.use_dynamic_bsz=true"]
    smaller += [f"{ACTOR}.ppo_max_token_len_per_gpu=16384"]
    hardware = Hardware("cuda", size * GIB, "a GPU")
    plan, _ = plan_of(models["7B"], "grpo", *settings, *smaller * (size < 80), hardware=hardware)
    (load,) = plan.loads
    assert plan.fits and gib_of(load, "rollout: KV cache") > 1
    taken = taken_beside_rollouts(plan.config)
    assert taken == plan.taken_beside_rollouts > 0
    block = plan.config.actor_rollout_ref
    spec = ModelSpec.from_config(load_hf_config({"path": models["7B"]}))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (size * GIB, size * GIB))
    for name in ("memory_reserved", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 0)
    request = EngineRequest(torch.device("cuda:0"), torch.bfloat16, 4096, 10**6, training_bytes=taken)
    rows = max(rows_of_step(plan.config), plan.config.data.val_batch_size) // 8
    in_the_run = _kv_bytes(block.rollout, spec, request, sequences_at_once(1024, rows)) / GIB
    assert in_the_run == pytest.approx(gib_of(load, "rollout: KV cache"), rel=0.01)


def test_grpo_of_72b_on_4_nodes_names_the_device_the_lack_and_what_to_change(models):
    split = "actor_rollout_ref.rollout.tensor_model_parallel_size"
    shape = ("trainer.nnodes=4", "trainer.n_gpus_per_node=8")
    plan, lines = plan_of(models["72B"], "grpo", *shape, f"{split}=1")
    load, phase, left = plan.tightest
    assert not plan.fits and phase == "rollout" and left == 80 * GIB - load.total(phase) < -50 * GIB
    assert any(line.startswith("each of the 32 GPUs would need") for line in lines)
    assert lines[-1].startswith(f"what to change: {split} (vLLM); ")
    apart = ("actor_rollout_ref.rollout.placement=apart", "actor_rollout_ref.rollout.name=vllm")
    budgets = (f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu=2048")
    nodes = (*shape, *budgets, f"{ACTOR}.ulysses_sequence_parallel_size=2")
    for placement in (apart, ()):
        fitting, after = plan_of(models["72B"], "grpo", *nodes, *placement)
        assert fitting.fits and after[-1].startswith("fits")
    _, by_default = plan_of(models["72B"], "grpo", *nodes, apart[0])  # the machine is taken to have vLLM
    assert by_default[-1].startswith("fits") or torch.cuda.is_available()
    tight, words = plan_of(models["72B"], "grpo", *nodes, *apart, f"{split}=1")
    assert not tight.fits and "leaves no KV cache within" in tight.problems[0]
    assert words[-2] == tight.problems[0]


def test_on_cpu_the_plan_has_what_models_keep_and_says_what_the_largest_pass_takes(tmp_path):
    laptop = Hardware("cpu", 8 * GIB, "a laptop")
    plan, lines = plan_of(write_small(tmp_path), "gae", hardware=laptop)
    items = plan.loads[0].items
    assert {name.partition(": ")[2] for name in items} == {"weights", "gradients", "optimizer state"}
    assert "what rollouts and processes take beside the models is not planned on CPU" in lines
    # trajectories of up to 4,096 tokens, all of which they may share: 2,048 + 2 * 4,096
    assert plan.largest_pass.tokens == 10240
    most = gib(plan.largest_pass.num_bytes)
    words = f"a pass takes at most {most} GiB beside the models: 10,240 tokens in the"
    assert any(line.startswith(words) for line in lines)
    budget = [f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu=5000"]
    budget.append("critic.ppo_max_token_len_per_gpu=5000")
    lower, _ = plan_of(write_small(tmp_path), "gae", *budget, hardware=laptop)
    assert lower.largest_pass.tokens == 5000
    assert lower.largest_pass.num_bytes < 0.6 * plan.largest_pass.num_bytes
    assert plan.fits and lines[-1].endswith("GiB left for all but its models")
    smaller, words = plan_of(write_small(tmp_path), "gae", hardware=Hardware("cpu", 10**5, "a watch"))
    assert not smaller.fits and words[-2].startswith("the node would need")


def test_a_cache_below_one_trajectory_is_a_problem_of_its_own(tmp_path):
    small = "actor_rollout_ref.rollout.kv_cache_gb=0.0001"
    laptop = Hardware("cpu", 8 * GIB, "a laptop")
    plan, lines = plan_of(write_small(tmp_path), "grpo", small, hardware=laptop)
    assert plan.tightest.num_bytes_left > 0 and not plan.fits
    assert "one trajectory of 4096 tokens needs" in plan.problems[0]
    assert "actor_rollout_ref.rollout.kv_cache_gb" in lines[-1]


# -------------------------------------------------------------------------------- the program


@pytest.fixture
def nothing_is_started(monkeypatch):
    def refuse(*arguments: object, **keywords: object) -> None:
        raise AssertionError("a dry run starts nothing")

    for name in ("verl.planning.placement.start_ray", "verl.preflight.preflight.passes_quick_checks"):
        monkeypatch.setattr(name, refuse)
    monkeypatch.setattr(main_ppo, "build_trainer", refuse)


@pytest.mark.usefixtures("nothing_is_started")
def test_a_dry_run_needs_a_config_json_alone_also_for_vllm(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: None if name == "vllm" else object())
    line = [*search_r1_settings(write_small(tmp_path), "grpo"), "trainer.dry_run=true"]
    assert main_ppo.run([*line, "trainer.device=cpu"]) == 0
    out = capsys.readouterr().out
    assert "driver: this process, on " in out and "processes: 1 x 1, FSDP2" in out and "\nfits: " in out
    gpu = ["actor_rollout_ref.rollout.name=vllm", "trainer.dry_run_gpu_memory_gb=80"]
    assert main_ppo.run([*line, *gpu]) == 0
    assert "80.00 GiB for each GPU" in capsys.readouterr().out


@pytest.mark.usefixtures("nothing_is_started")
def test_a_dry_run_that_cannot_fit_ends_with_2_and_says_why(models, capsys):
    line = [*search_r1_settings(models["7B"], "gae"), "trainer.n_gpus_per_node=8", "trainer.dry_run=true"]
    assert main_ppo.run([*line, "trainer.dry_run_gpu_memory_gb=40"]) == 2
    out, err = capsys.readouterr()
    assert "40.00 GiB for each GPU" in out
    assert "error: each of the 8 GPUs would need" in err and "GiB too much" in err
    assert "error: what to change: " in err
    assert main_ppo.run([*line, "trainer.device=cuda"]) == 2
    assert "trainer.dry_run_gpu_memory_gb=80" in capsys.readouterr().err


# -------------------------------------------------------------------------------- accuracy


@pytest.mark.slow
def test_the_plan_is_what_the_tensors_of_a_real_update_take():
    """A PPO step's engines in one process: storages of all tensors after a backward pass and a step."""
    from verl.packing.packs import pack_rows
    from verl.trainer.main_ppo import worker_classes
    from verl.workers.engine.training_engine import MicroBatchLoss

    rows = 2
    length = 24
    config = load_config(
        [
            *search_r1_settings(BASE_MODEL, "gae"),
            "trainer.device=cpu",
            "data.max_prompt_length=512",
            "data.train_batch_size=8",
            "data.val_batch_size=8",
            f"{ACTOR}.ppo_mini_batch_size=8",
        ]
    )
    plan = Plan(config, Hardware.of(config))
    expected = {name: max(phases.values()) for name, phases in plan.loads[0].items.items()}
    actor_class, critic_class = worker_classes(config)
    actor = actor_class(
        config.actor_rollout_ref, "actor_rollout_ref", agent_factory=lambda *_: None, device="cpu"
    )
    critic = critic_class(config.critic, device="cpu")
    batch = {
        "input_ids": torch.arange(rows * length).view(rows, length) % 997,
        "attention_mask": torch.ones(rows, length, dtype=torch.int64),
        "position_ids": torch.arange(length).expand(rows, length),
        "response_mask": torch.ones(rows, length // 2, dtype=torch.bool),
    }
    for owner, worker, options in (
        ("actor", actor, {"temperature": 1.0, "with_entropy": True}),
        ("critic", critic, {}),
    ):
        worker.init_model()
        engine = worker.engine
        pack = pack_rows(batch, list(range(rows)), engine.device)
        engine.forward_backward(
            [pack], 1, lambda _, out: MicroBatchLoss(out[0].square().sum(), {}), **options
        )
        assert expected[f"{owner}: weights"] == num_bytes(engine.module.parameters())
        assert expected[f"{owner}: gradients"] == num_bytes(p.grad for p in engine.module.parameters())
        engine.step()
        states = [x for values in engine.optimizer.state.values() for x in values.values()]
        in_all = num_bytes(x for x in states if torch.is_tensor(x))
        assert expected[f"{owner}: optimizer state"] == pytest.approx(in_all, rel=1e-3)
    assert expected["reference: weights"] == num_bytes(actor.reference.own_engine.module.parameters())


def num_bytes(tensors) -> int:
    """Of the tensors' storages, each once."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
