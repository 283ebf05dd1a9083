"""What Search-R1's users type: its 13 command lines, and every key of its files."""

import re
from pathlib import Path

import pytest
import yaml
from search_r1_command_lines import SCRIPTS, command_lines

from verl.config import Config, get_value, load, load_config
from verl.config.compatibility import RL, SFT
from verl.config.keys import format_value, keys_of
from verl.trainer.config import validate

SEARCH_R1_BLOCKS = {
    name: block.split()
    for name, block in re.findall(
        r"\[(\w+)\]\n(.*?)(?=\n\[|\Z)",
        (Path(__file__).parent / "search_r1_keys.txt").read_text(encoding="utf-8"),
        re.DOTALL,
    )
}


@pytest.fixture()
def lines(files, tmp_path, monkeypatch) -> dict[str, list[str]]:
    """All of them ask for vLLM: a package of that name is found, and nothing of it is read."""
    (tmp_path / "packages" / "vllm").mkdir(parents=True)
    (tmp_path / "packages" / "vllm" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    return command_lines(
        {
            "DATA_DIR": str(files),
            "TRAIN_DATA_DIR": str(files),
            "TEST_DATA_DIR": str(files),
            "BASE_MODEL": str(files / "model"),
            "EXPERIMENT_NAME": "nq-search-r1",
            "WAND_PROJECT": "Search-R1",
            "N_NODES": "4",
        }
    )


def check(script: str, arguments: list[str]) -> Config:
    config = load_config(arguments)
    validate(config, format_reward="format" in script)
    return config


def test_there_are_thirteen_scripts_and_sixty_six_keys():
    assert len(SCRIPTS) == 13
    assert len({key.lstrip("+") for overrides in SCRIPTS.values() for key in overrides}) == 66


@pytest.mark.parametrize("script", SCRIPTS)
def test_each_search_r1_command_line_is_a_valid_configuration_with_its_values(script, lines):
    config = check(script, lines[script])
    replicas = config.trainer.nnodes * config.trainer.n_gpus_per_node
    for argument in lines[script]:
        key, _, text = argument.lstrip("+").partition("=")
        value = float(text) if re.fullmatch(r"[\d.]+e-\d+", text) else yaml.safe_load(text)
        if key in RL.aliases:
            assert get_value(config, f"{key}_per_gpu") == max(1, value // replicas), key
        elif key not in RL.fixed and key not in RL.without_effect:
            assert get_value(config, key) == value, key
    assert all("grad_offload=true has no effect" in note for note in load(lines[script]).notes)


def test_the_group_and_the_batches_mean_what_they_mean_in_search_r1(lines):
    config = check("train_grpo.sh", lines["train_grpo.sh"])
    rollout = config.actor_rollout_ref.rollout
    actor = config.actor_rollout_ref.actor
    assert rollout.n * rollout.n_agent == 5
    assert config.data.train_batch_size * 5 // (actor.ppo_mini_batch_size * rollout.n) == 10  # updates
    assert config.trainer.logger == ["wandb"]


def test_format_scores_need_the_format_program(lines):
    with pytest.raises(ValueError, match="main_ppo_format"):
        validate(load_config(lines["scripts/nq_hotpotqa/v0.3/train_ppo_format.sh"]))


def test_every_key_of_search_r1s_files_is_known():
    """The 143 keys of its file, those that it reads with a "+", and the 119 of its megatron file."""
    assert (len(SEARCH_R1_BLOCKS["yaml"]), len(SEARCH_R1_BLOCKS["megatron"])) == (143, 119)
    for block in SEARCH_R1_BLOCKS.values():
        assert set(block) <= {*keys_of(Config), *RL.names}


@pytest.mark.parametrize("name", RL.fixed)
def test_a_fixed_key_is_taken_with_its_value_and_refused_with_the_reason(name):
    value, reason = RL.fixed[name]
    load_config([f"+{name}={format_value(value)}"])
    other = {False: "true", True: "false"}[value] if isinstance(value, bool) else "7"
    with pytest.raises(ValueError) as error:
        load_config([f"{name}={other}"])
    assert f"Found {name}={other}; expected {format_value(value)}. {reason}" in str(error.value)


NUMBERS = {"two": 2, "three": 3, "four": 4, "twelve": 12, "thirteen": 13, "fourteen": 14, "fifteen": 15}
DIFFERENCES = (  # that a user of Search-R1 would look for in vain elsewhere
    "of nested `<answer>` tags the inner one is read",
    "`subem` never finds such a golden answer",
    "a turn that holds an answer and a search does the first of them",
    "an empty search is no action",
    "a context that is full ends its trajectory",
    "an observation that is cut keeps its closing tag",
    "the hint after a turn without an action has other words",
    "in the structure reward an `<information>` that the policy writes itself breaks the structure",
)


def coming_from_search_r1() -> str:
    """Return docs/search_r1.md in one line."""
    text = (Path(__file__).parents[2] / "docs" / "search_r1.md").read_text(encoding="utf-8")
    return " ".join(text.split())


def test_the_page_says_how_many_keys_have_no_effect():
    stated = re.search(r"(\w+) keys, and (\w+) of supervised training, are taken", coming_from_search_r1())
    assert stated is not None
    counts = [NUMBERS.get(word.lower()) for word in stated.groups()]
    assert counts == [len(RL.without_effect), len(SFT.without_effect)]


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_the_page_names_what_is_different_from_search_r1(difference):
    assert difference in coming_from_search_r1()


@pytest.mark.parametrize("name", RL.without_effect)
def test_a_key_without_effect_is_taken_with_a_note(name):
    usual, reason = RL.without_effect[name]
    assert load([f"{name}={format_value(usual)}"]).notes == []
    assert load([f"{name}=9"]).notes == [f"{name}=9 has no effect: {reason}"]


@pytest.mark.parametrize("name", [name for name, alias in RL.aliases.items() if alias.convert is None])
def test_an_alias_sets_its_key_unless_that_is_set(name):
    key = RL.aliases[name].key
    default = get_value(load_config([]), key)
    others = {bool: True, int: 25, float: 0.25, str: "http://127.0.0.1:9"}
    other = others[type(default)]
    assert get_value(load_config([f"{name}={format_value(other)}"]), key) == other
    assert (
        get_value(load_config([f"{name}={format_value(other)}", f"{key}={format_value(default)}"]), key)
        == default
    )


def test_an_alias_on_the_command_line_wins_over_its_key_in_a_file(tmp_path):
    (tmp_path / "a.yaml").write_text("critic: {ppo_micro_batch_size_per_gpu: 2}\n")
    assert load_config([f"@{tmp_path}/a.yaml"]).critic.ppo_micro_batch_size_per_gpu == 2
    line = [f"@{tmp_path}/a.yaml", "critic.ppo_micro_batch_size=8"]
    assert load_config(line).critic.ppo_micro_batch_size_per_gpu == 8


def test_enforce_eager_joins_the_other_arguments_of_vllm_which_win():
    rollout = "actor_rollout_ref.rollout"
    settings = [f"{rollout}.enforce_eager=true", f"{rollout}.vllm.engine_args.seed=3"]
    assert load_config(settings).actor_rollout_ref.rollout.vllm.engine_args == {
        "enforce_eager": True,
        "seed": 3,
    }
    settings.append(f"{rollout}.vllm.engine_args.enforce_eager=false")
    assert not load_config(settings).actor_rollout_ref.rollout.vllm.engine_args["enforce_eager"]
