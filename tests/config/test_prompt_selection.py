"""The block `prompt_selection`: its earlier names, and what its keys mean for one another."""

import pytest
from quick_config import config_with

from verl.config import Config, get_value, load, load_config
from verl.config.compatibility import RL
from verl.config.keys import keys_of
from verl.config.prompt_selection import FILTER, POOLS, RETIRE, check_prompt_selection
from verl.planning.config_validation import settings_without_effect

VERLS = "algorithm.filter_groups"
EARLIER_POOLS = "data.difficulty_pools"
GROUP = "actor_rollout_ref.rollout.n_agent=4"


def test_every_key_of_the_block_has_its_earlier_name():
    keys = {key for key in keys_of(Config) if key.startswith("prompt_selection.")}
    assert set(RL.renamed.values()) == keys
    assert RL.earlier_names == {name for name in RL.renamed if name.startswith(EARLIER_POOLS)} | {
        f"{VERLS}.retire_solved"
    }


def test_a_key_may_have_its_earlier_name_in_every_layer(tmp_path):
    (tmp_path / "a.yaml").write_text(
        "algorithm: {filter_groups: {enable: true, retire_solved: 1, metric: acc}}\n"
        "data: {difficulty_pools: {hard_share: 0.3}}\n"
    )
    environment = {"VERL__ALGORITHM__FILTER_GROUPS__MAX_NUM_GEN_BATCHES": "3"}
    line = [f"@{tmp_path}/a.yaml", f"+{VERLS}.metric=seq_reward", f"++{EARLIER_POOLS}={{enable: true}}"]
    loaded = load(line, environment=environment)
    selection = loaded.config.prompt_selection
    assert (selection.filter_groups.enable, selection.filter_groups.metric) == (True, "seq_reward")
    assert (selection.filter_groups.max_num_gen_batches, selection.retire_solved) == (3, 1)
    assert (selection.difficulty_pools.enable, selection.difficulty_pools.hard_share) == (True, 0.3)
    assert type(selection.retire_solved) is float
    assert loaded.origins[f"{FILTER}.metric"] == f"command line ({VERLS}.metric)"
    assert loaded.origins[f"{FILTER}.enable"] == f"{tmp_path}/a.yaml ({VERLS}.enable)"
    assert loaded.notes == [
        f"{VERLS}.retire_solved is called {RETIRE} now.",
        f"{EARLIER_POOLS}.hard_share is called {POOLS}.hard_share now.",
        f"{EARLIER_POOLS}.enable is called {POOLS}.enable now.",
    ]


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ([f"{FILTER}.metric=acc", f"{VERLS}.metric=null"], None),
        ([f"{VERLS}.metric=acc", f"{FILTER}.metric=em"], "em"),
        ([f"{FILTER}.metric=em", f"{VERLS}.metric=acc"], "acc"),
        ([f"{FILTER}.metric=em", f"{VERLS}.metric=007"], "007"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_the_last_one_counts_whatever_name_it_has(arguments, value):
    assert get_value(load_config(arguments), f"{FILTER}.metric") == value


def test_an_earlier_name_can_be_deleted_and_can_hold_an_interpolation():
    line = ["+recipe=real_model_grpo", f"~{VERLS}.max_num_gen_batches"]
    config = load_config([*line, f"{VERLS}.metric=${{trainer.project_name}}"])
    groups = config.prompt_selection.filter_groups
    assert (groups.enable, groups.max_num_gen_batches, groups.metric) == (True, 10, "verl_examples")


def test_the_names_of_verl_and_the_values_of_every_earlier_config_yaml_are_taken_without_a_note():
    line = [f"{VERLS}.enable=true", f"{VERLS}.metric=acc", f"{VERLS}.max_num_gen_batches=5"]
    line += [f"{VERLS}.retire_solved=null", f"{EARLIER_POOLS}={{enable: false, easy_share: 0.1}}"]
    assert load(line).notes == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"{VERLS}=3", f"a group of keys; expected one of: {FILTER}.enable, {FILTER}.metric"),
        (f"{EARLIER_POOLS}=3", f"a group of keys; expected one of: {POOLS}.enable"),
        (f"{VERLS}.enabel=true", f"nearest known key is '{FILTER}.enable'"),
        (f"{VERLS}.enable=7", f"Found {FILTER}.enable=7; expected true or false"),
        ("data.difficulty_pool.easy_share=1", f"nearest known key is '{POOLS}.easy_share'"),
        ("trainer.algorithm.dynamic_sampling.type=filter", f"is {FILTER}.enable here"),
    ],
)
def test_a_mistake_in_an_earlier_name_is_told_with_the_present_one(text, words):
    with pytest.raises(ValueError, match=words):
        load_config([text])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ([f"{POOLS}.hard_threshold=1"], "hard_threshold=1 with .*easy_threshold=1; expected the first to be"),
        (["data.streaming=true", f"{POOLS}.enable=true"], "data.streaming=true with .*ask for rows at any"),
        ([f"{POOLS}.enable=true", f"{RETIRE}=0"], "retire_solved=0 with .*hard_threshold=0, so that hard"),
        ([f"{POOLS}.easy_share=0.7", f"{POOLS}.hard_share=0.6"], "expected at most 1 together"),
        ([f"{FILTER}.metric=acc"], f"without {FILTER}.enable=true; expected both"),
        ([f"{FILTER}.enable=true"], "one trajectory a prompt; expected a group"),
    ],
)
def test_a_contradiction_is_seen_without_the_estimator(settings, words):
    with pytest.raises(ValueError, match=words):
        check_prompt_selection(config_with(*settings))


def test_keys_that_go_together_pass():
    line = [GROUP, f"{FILTER}.enable=true", f"{POOLS}.enable=true", f"{RETIRE}=1"]
    config = config_with(*line)
    check_prompt_selection(config, compares_group=True)
    with pytest.raises(ValueError, match="does not compare the answers"):
        check_prompt_selection(config, compares_group=False)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ([f"{FILTER}.max_num_gen_batches=3"], f"{FILTER}.max_num_gen_batches=3"),
        ([f"{POOLS}.easy_threshold=2"], f"{POOLS}.easy_threshold=2"),
        ([f"{POOLS}.hard_share=0.5"], f"{POOLS}.hard_share=0.5"),
        ([f"{POOLS}.enable=true", f"{RETIRE}=1", f"{POOLS}.easy_share=0.5"], f"{POOLS}.easy_share=0.5"),
    ],
)
def test_a_key_that_nothing_reads_is_noted(settings, key):
    (line,) = settings_without_effect(config_with(GROUP, *settings))
    assert line.startswith(f"{key} has no effect: ")


@pytest.mark.parametrize(
    "settings",
    [
        [f"{FILTER}.enable=true", f"{FILTER}.max_num_gen_batches=3"],
        [f"{POOLS}.enable=true", f"{POOLS}.easy_share=0.5", f"{POOLS}.easy_threshold=2"],
        [f"{POOLS}.enable=true", f"{RETIRE}=1", f"{POOLS}.easy_share=0.5", "algorithm.thrift=1"],
    ],
)
def test_a_key_that_is_read_is_not_noted(settings):
    assert settings_without_effect(config_with(GROUP, *settings)) == []
