"""Rule 12: every key does something, and the table that says what is true.

Three cases: a key is read by the function that the table names; or it may only keep its default, and a change
is refused with the reason; or (a few that Search-R1's scripts set) it has no meaning here, which is written
down.
"""

import re
from pathlib import Path

import pytest
from config_places import is_read
from omegaconf import OmegaConf

from verl.trainer.config.keys import FIXED, NO_EFFECT, READ_IN
from verl.trainer.config.limits import CHOICES, NULLABLE, RANGES
from verl.trainer.config.loading import CONFIG_DIR, known_keys, load_config


def test_rule_12_every_key_is_in_exactly_one_table():
    for key in known_keys():
        tables = [name for name, table in TABLES.items() if key in table]
        assert len(tables) == 1, f"{key} is in {tables}"
    for table in (*TABLES.values(), NULLABLE, CHOICES, RANGES):
        assert set(table) <= set(known_keys())


TABLES = {"READ_IN": READ_IN, "FIXED": FIXED, "NO_EFFECT": NO_EFFECT}


@pytest.mark.parametrize("key", READ_IN)
def test_rule_12_a_key_is_read_where_the_table_says(key):
    assert is_read(key, READ_IN[key]), READ_IN[key]


def test_few_keys_have_no_effect_and_each_says_why():
    assert len(NO_EFFECT) <= 7
    assert all(reason.endswith(".") for reason in (*NO_EFFECT.values(), *FIXED.values()))


def test_every_key_that_is_null_by_default_has_a_type():
    raw = OmegaConf.load(CONFIG_DIR / "ppo_trainer.yaml")
    empty = [key for key in known_keys() if OmegaConf.select(raw, key, default=None) is None]
    filled_in = {"trainer.val_before_train", "trainer.val_only"}
    assert set(empty) - filled_in <= set(NULLABLE)


def test_every_line_of_the_file_that_sets_a_key_of_its_own_says_what_it_is():
    text = (CONFIG_DIR / "ppo_trainer.yaml").read_text(encoding="utf-8")
    policy = text[: text.index("\ncritic:")] + text[text.index("\ncustom_reward_function:") :]
    keys = [line for line in policy.splitlines() if re.match(r" *\w+: \S", line)]
    follows = [line for line in keys if "#" not in line]
    assert len(keys) > 100
    repeated = ("log_prob_use_dynamic_bsz", "log_prob_max_token_len_per_gpu", "experiment_name")
    assert [line for line in follows if line.split(":")[0].strip() not in repeated] == []


def test_search_r1s_keys_are_all_there():
    """The 143 keys of Search-R1's file and those that it reads with a "+" from the command line."""
    assert len(SEARCH_R1_BLOCKS["yaml"]) == 143
    for name in ("yaml", "plus"):
        assert set(SEARCH_R1_BLOCKS[name]) <= set(known_keys())


SEARCH_R1_BLOCKS = {
    name: block.split()
    for name, block in re.findall(
        r"\[(\w+)\]\n(.*?)(?=\n\[|\Z)",
        (Path(__file__).parent / "search_r1_keys.txt").read_text(encoding="utf-8"),
        re.DOTALL,
    )
}


def test_the_defaults_are_valid_but_for_files_and_model():
    config = load_config([])
    assert config.data.train_files is None and config.actor_rollout_ref.model.path is None
