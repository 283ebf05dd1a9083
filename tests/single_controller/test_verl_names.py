"""What code written for verl calls on workers, groups and batches.

Read from verl's own tests, v0.7.0: tests/test_protocol_on_cpu.py and, in tests/single_controller,
base/test_decorator.py, test_decorator_on_cpu.py, test_auto_padding_on_cpu.py, test_colocated_workers.py; of
v0.2 tests/ray/test_colocated_workers.py and tests/utility/test_tensor_dict_utilities.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from verl import DataProto
from verl.data.rl_dataset import RLHFDataset as DatasetOfRuns
from verl.planning.placement import ResourcePoolManager, Role
from verl.protocol import (
    DataProtoConfig,
    fold_batch_dim,
    unfold_batch_dim,
    union_numpy_dict,
    union_tensor_dict,
)
from verl.single_controller.base import ClassWithInitArgs, ResourcePool, Worker
from verl.single_controller.base.decorator import (
    DISPATCH_MODE_FN_REGISTRY,
    Dispatch,
    get_predefined_dispatch_fn,
    make_nd_compute_dataproto_dispatch_fn,
    register,
    register_dispatch_mode,
)
from verl.single_controller.base.worker_group import create_colocated_worker_cls
from verl.single_controller.local import LocalWorkerGroup
from verl.utils import hf_tokenizer
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.metric import reduce_metrics

ROOT = Path(__file__).parents[2]


def batch(num_rows: int, **meta_info) -> DataProto:
    labels = np.array([f"row {i}" for i in range(num_rows)], dtype=object)
    return DataProto.from_dict(
        {"x": torch.arange(num_rows)}, {"labels": labels}, meta_info, auto_padding=True
    )


class Adder(Worker):
    def __init__(self, amount: int = 1) -> None:
        super().__init__()
        self.amount = amount
        self._register_dispatch_collect_info(mesh_name="train", dp_rank=self.rank, is_collect=True)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    async def add(self, data: DataProto) -> DataProto:
        data.batch["x"] = data.batch["x"] + self.amount
        return data

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"))
    def add_in_mesh(self, data: DataProto) -> DataProto:
        data.batch["x"] = data.batch["x"] + self.amount
        return data

    @register(
        dispatch_mode={
            "dispatch_fn": lambda group, number: (([number] * group.world_size,), {}),
            "collect_fn": lambda group, outputs: sum(outputs) + 100 * group.world_size,
        }
    )
    def double(self, number: int) -> int:
        return 2 * number

    def plain(self, number: int) -> int:
        return number + self.amount


def test_async_methods_and_modes_given_as_dicts_run():
    with LocalWorkerGroup(ClassWithInitArgs(Adder, amount=5)) as group:
        assert group.add(batch(3)).batch["x"].tolist() == [5, 6, 7]
        assert group.add_in_mesh(batch(2)).batch["x"].tolist() == [5, 6]
        assert group.double(4) == 108


def test_any_method_runs_on_all_ranks_by_its_name():
    with LocalWorkerGroup(ClassWithInitArgs(Adder, amount=5)) as group:
        assert group.execute_all_sync("plain", 1) == [6]
        assert group.execute_all_sync("plain", [2]) == [7], "a list with an entry for each rank is dealt out"
        assert group.execute_rank_zero_sync("plain", number=3) == 8
        assert len(group.execute_all_async("plain", 1)) == 1


def test_roles_are_spawned_by_prefix_set():
    colocated = create_colocated_worker_cls(
        {"actor": ClassWithInitArgs(Adder), "critic": ClassWithInitArgs(Adder, 7)}
    )
    with LocalWorkerGroup(colocated) as group:
        roles = group.spawn(prefix_set={"actor": 0, "critic": 0}.keys())
        assert roles["critic"].add(batch(1)).batch["x"].tolist() == [7]
        assert roles["critic"].add_in_mesh(batch(1)).batch["x"].tolist() == [7]


def test_a_new_dispatch_mode_becomes_a_name():
    def split(group, *args):
        return args, {}

    def join(group, outputs):
        return outputs

    try:
        register_dispatch_mode("SPLIT_MODE", split, join)
        assert get_predefined_dispatch_fn(Dispatch.SPLIT_MODE) == {"dispatch_fn": split, "collect_fn": join}
    finally:
        DISPATCH_MODE_FN_REGISTRY.pop("SPLIT_MODE", None)
        Dispatch.remove("SPLIT_MODE")


def test_a_tokenizer_without_padding_pads_with_its_end(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "data_prep" / "base_model")
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    assert hf_tokenizer(str(tmp_path)).pad_token_id == tokenizer.eos_token_id
    assert hf_tokenizer(str(tmp_path), correct_pad_token=False).pad_token_id is None


def test_metrics_are_reduced_by_their_names():
    """The example in verl/utils/metric/utils.py of verl 0.8.0."""
    metrics = {"loss": [1.0, 2.0, 3.0], "max_reward": [5.0, 8.0, 6.0], "min_error": [0.1, 0.05, 0.2]}
    assert reduce_metrics(metrics) == {"loss": 2.0, "max_reward": 8.0, "min_error": 0.05}


def test_the_reward_manager_is_where_search_r1_has_it():
    from verl.trainer import main_ppo, ppo

    assert main_ppo.RewardManager is ppo.scoring.RewardManager


def test_roles_and_pools_take_verls_arguments():
    manager = ResourcePoolManager({"global_pool": [2]}, {Role.RefPolicy: "global_pool"})
    manager.create_resource_pool()
    pool = manager.get_resource_pool(Role.RefPolicy)
    assert pool.process_on_nodes == [2]


@pytest.mark.ray
def test_ray_pools_and_groups_take_verls_arguments():
    pytest.importorskip("ray")
    from verl.single_controller.ray.base import RayResourcePool

    pool = RayResourcePool(process_on_nodes=[2], use_gpu=False, name_prefix="a", max_colocate_count=3)
    assert pool.world_size == 2


def test_metrics_as_lists_of_dicts_are_joined():
    parts = [
        batch(2, metrics=[{"loss": 0.5}], flag=True),
        batch(2, flag=True),
        batch(1, metrics=[{"loss": 0.6}]),
    ]
    joined = DataProto.concat(parts)
    assert joined.meta_info == {"metrics": {"loss": [0.5, 0.6]}, "flag": True} and len(joined) == 5


def test_what_does_not_go_together_is_also_an_assertion_error():
    with pytest.raises(AssertionError, match="Conflicting values for meta_info key 'step'"):
        DataProto.concat([batch(1, step=1), batch(1, step=2)])
    with pytest.raises(AssertionError):
        batch(3).chunk(2)
    with pytest.raises(AssertionError):
        DataProto.from_dict({"x": torch.zeros(2, 2)}, num_batch_dims=2)
    one = batch(2).batch
    other = batch(2).batch + 1
    with pytest.raises(AssertionError):
        union_tensor_dict(one, other)


def test_unions_keep_equal_columns_and_know_nan_and_arrays_that_hold_themselves():
    assert union_tensor_dict(batch(2).batch, batch(2).batch)["x"].tolist() == [0, 1]
    nan = np.array([1.0, np.nan, "nan"], dtype=object)
    assert union_numpy_dict({"a": nan}, {"a": nan.copy(), "b": nan}).keys() == {"a", "b"}
    circles = [np.array([None], dtype=object) for _ in range(2)]
    for circle in circles:
        circle[0] = circle
    union_numpy_dict({"a": circles[0]}, {"a": circles[1]})
    with pytest.raises(AssertionError, match="`a`"):
        union_numpy_dict({"a": circles[0]}, {"a": np.array([None], dtype=object)})


def test_rows_fold_unfold_repeat_and_pad():
    data = batch(3).repeat(2)
    folded = fold_batch_dim(data, new_batch_size=3)
    assert folded.batch["x"].tolist() == [[0, 0], [1, 1], [2, 2]] and folded.non_tensor_batch[
        "labels"
    ].shape == (3, 2)
    folded.reorder(torch.tensor([2, 0, 1]))
    assert unfold_batch_dim(folded, batch_dims=2).batch["x"].tolist() == [2, 2, 0, 0, 1, 1]
    repeated = batch(3).sample_level_repeat([2, 0, 1])
    assert repeated.non_tensor_batch["labels"].tolist() == ["row 0", "row 0", "row 2"]
    padded = batch(3)
    padded.padding(2)
    assert padded.batch["x"].tolist() == [0, 1, 2, 0, 0] and padded.is_padding_enabled()
    assert DataProtoConfig.auto_padding is False


def test_a_subclass_makes_batches_of_its_own_kind():
    class Custom(DataProto):
        pass

    assert type(Custom.from_single_dict({"x": torch.tensor([0])})) is Custom


def rows_of_numbers(num_rows: int) -> list[dict]:
    prompt = [{"role": "user", "content": "a b"}]
    return [
        {"prompt": prompt, "data_source": "nq", "reward_model": {"ground_truth": str(number)}}
        for number in range(num_rows)
    ]


def test_the_data_set_of_runs_has_verls_name_and_verls_arguments(tmp_path):
    """verl 0.9.1's trainer makes it like this, with a config that has more keys than ours."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows_of_numbers(5)))
    config = {"prompt_key": "prompt", "max_prompt_length": 8, "tokenizer": None, "cache_dir": "~/cache"}

    def answers(**arguments):
        rows = RLHFDataset(data_files=str(file), tokenizer=None, **arguments).rows
        return [row["reward_model"]["ground_truth"] for row in rows]

    assert issubclass(RLHFDataset, DatasetOfRuns)
    assert answers(config=config, processor=None, max_samples=-1) == list("01234")
    assert answers(config=config, max_samples=2) == list("01")
    drawn = np.random.default_rng(3).choice(5, size=2, replace=False)
    shuffled = config | {"shuffle": True, "seed": 3}
    assert answers(config=shuffled, max_samples=2) == [str(number) for number in drawn]
    assert len(RLHFDataset(parquet_files=[str(file)], tokenizer=None, prompt_key="prompt")) == 5
    with pytest.raises(ValueError, match="processor: found one"):
        answers(config=config, processor=object())
    with pytest.raises(ValueError, match="Found a config and prompt_key"):
        answers(config=config, prompt_key="prompt")
    with pytest.raises(ValueError, match="Found 0 of data_files and parquet_files"):
        RLHFDataset(tokenizer=None, config=config)


def test_a_batch_makes_an_iterator_from_verls_arguments():
    shuffled = list(batch(4).make_iterator(2, epochs=1, seed=1, dataloader_kwargs={"shuffle": True}))
    same = list(batch(4).make_iterator(2, epochs=1, seed=1, shuffle=True))
    assert [part.batch["x"].tolist() for part in shuffled] == [part.batch["x"].tolist() for part in same]
    with pytest.raises(ValueError, match=r"dataloader_kwargs: found \['drop_last'\]"):
        next(batch(4).make_iterator(2, 1, dataloader_kwargs={"drop_last": True}))


def test_ranks_know_how_many_there_are_on_their_node_under_verls_name_too():
    environments = ResourcePool([2, 1]).variables("address", 1)
    assert [environment["RAY_LOCAL_WORLD_SIZE"] for environment in environments] == ["2", "2", "1"]


@pytest.mark.ray
def test_worker_env_must_not_replace_what_the_group_sets():
    """verl 0.9.1's tests/single_controller/test_ray_local_envs_on_cpu.py expects the same."""
    pytest.importorskip("ray")
    from verl.single_controller.ray.base import RayResourcePool, RayWorkerGroup

    pool = RayResourcePool([4], False, "prefix", 3)
    with pytest.raises(ValueError, match="worker_env: found WORLD_SIZE, which the group sets"):
        RayWorkerGroup(
            resource_pool=pool,
            ray_cls_with_init=ClassWithInitArgs(Worker),
            name_prefix="group",
            worker_env={"WORLD_SIZE": "100", "test_key": "test_value"},
        )
