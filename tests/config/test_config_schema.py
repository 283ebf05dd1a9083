"""The schema: each key is declared once, and what is made from it is fresh."""

import copy
import json
import pickle
import subprocess
import sys

import pytest
import yaml

from verl.config import Config, SFTConfig, load, load_config, load_sft_config, to_dict
from verl.config.__main__ import generated_files
from verl.config.command_line import read_arguments
from verl.config.keys import check_values, keys_of, replace_values, settable
from verl.config.render import json_schema, read_yaml, to_yaml, write_yaml

KEYS = settable(Config)
SFT_KEYS = settable(SFTConfig)
DEFAULTS = {Config: load_config([]), SFTConfig: load_sft_config([])}
EVERY = [(schema, path) for schema in (Config, SFTConfig) for path in settable(schema)]


def check_with(schema, path: str, value: object) -> None:
    check_values(replace_values(DEFAULTS[schema], {path: value}))


def test_each_key_says_what_it_means_and_has_a_valid_default():
    for keys in (KEYS, SFT_KEYS):
        assert all(len(each.meaning) > 5 for each in keys.values())
    for config in DEFAULTS.values():
        check_values(config)


@pytest.mark.parametrize(("schema", "path"), EVERY, ids=lambda value: getattr(value, "__name__", value))
def test_a_value_that_a_key_can_not_have_is_refused_with_what_is_expected(schema, path):
    each = settable(schema)[path]
    wrong: list[object] = [object()]
    if each.choices:
        wrong.append("nonsense")
    if each.bounds is not None:
        low = each.bounds.low
        high = each.bounds.high
        step = 1 if int in each.types else 0.5
        wrong.append(low if each.bounds.above else low - step)
        wrong += [] if high is None else [high + 1]
    if not each.nullable:
        wrong.append(None)
    for value in wrong:
        with pytest.raises(ValueError) as error:
            check_with(schema, path, value)
        assert f"Found {path}=" in str(error.value) and each.expected in str(error.value)


@pytest.mark.parametrize("path", [path for path, each in keys_of(Config).items() if each.must_follow])
def test_a_key_that_must_follow_another_is_taken_with_its_value_and_refused_with_another(path):
    each = keys_of(Config)[path]
    value = 7
    with pytest.raises(ValueError) as error:
        check_with(Config, path, value)
    assert f"as {each.follows} is" in str(error.value) and each.must_follow in str(error.value)


@pytest.mark.parametrize("file", generated_files(), ids=lambda file: file.name)
def test_what_is_made_from_the_schema_is_fresh(file):
    assert file.read_text(encoding="utf-8") == generated_files()[file], "run python -m verl.config"


def test_the_readable_file_holds_the_defaults(tmp_path):
    path = tmp_path / "all.yaml"
    path.write_text(to_yaml("ppo_trainer"))
    assert load_config([f"@{path}"]) == load_config([])


def test_a_runs_configuration_can_be_written_read_pickled_and_copied(tmp_path):
    config = load_config(["trainer.seed=7", "actor_rollout_ref.model.override_config={a: {b: [1]}}"])
    write_yaml(config, tmp_path / "config.yaml")
    assert read_yaml(tmp_path / "config.yaml") == to_dict(config)
    assert load_config(["@", str(tmp_path / "config.yaml")]) == config
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config


def test_a_name_that_looks_like_a_number_stays_a_name_when_it_is_written_and_read(tmp_path):
    config = load_config(["trainer.experiment_name=12e4567", "trainer.project_name=007"])
    write_yaml(config, tmp_path / "config.yaml")
    assert load_config([f"@{tmp_path / 'config.yaml'}"]) == config


def test_an_attribute_that_is_not_declared_can_not_be_read():
    with pytest.raises(AttributeError):
        _ = load_config([]).trainer.sed


@pytest.mark.parametrize("config", DEFAULTS.values(), ids=lambda config: type(config).__name__)
def test_a_loaded_configuration_is_frozen_and_says_how_to_derive_another(config):
    for block, name in ((config.trainer, "seed"), (config, "trainer"), (config.data, "sed")):
        with pytest.raises(AttributeError, match=f"assignment to '{name}' of .*replace_values"):
            setattr(block, name, 3)
        with pytest.raises(AttributeError, match="frozen"):
            delattr(block, name)


def test_a_derived_configuration_has_the_new_values_and_the_first_one_stays():
    first = DEFAULTS[Config]
    key = "actor_rollout_ref.actor.fsdp_config.fsdp_size"
    second = replace_values(first, {"trainer.seed": 7, key: 2})
    assert (first.trainer.seed, second.trainer.seed) == (0, 7)
    assert second.critic.model.fsdp_config.fsdp_size == 2, "it must follow the actor's"
    assert replace_values(second, {"trainer.seed": 0, key: -1}) == first
    block = replace_values(first.trainer, {"async_training.max_staleness": 3})
    assert block.async_training.max_staleness == 3 and block.seed == 0


def test_the_schema_for_editors_knows_every_key():
    programs = json.loads(json_schema())["anyOf"]
    for keys, top in zip((KEYS, SFT_KEYS), programs, strict=True):
        for path, each in keys.items():
            entry = top
            for name in path.split("."):
                entry = entry["properties"][name]
            assert entry["description"] == each.meaning


def test_help_and_mistakes_are_answered_without_torch():
    code = (
        "import sys\nfrom verl.trainer.main_ppo import run\n"
        "try:\n    status = run(sys.argv[1:])\nexcept SystemExit as stop:\n    status = stop.code\n"
        "assert 'torch' not in sys.modules\nassert status == 2 * ('--help' not in sys.argv)"
    )
    command = [sys.executable, "-c", code, "--help", "trainer.seed=41"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "seed: 41" in done.stdout, done.stderr
    for wrong in ("trainer.sede=1", "trainer.seed=x", "data.train_files=/nowhere.parquet"):
        done = subprocess.run([sys.executable, "-c", code, wrong], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stderr.startswith("error: Found") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("topic", "keys"),
    [
        ("trainer.save_freq", ["trainer.save_freq"]),
        ("save_freq", ["trainer.save_freq"]),
        ("retriever", [key for key in settable(Config) if key.startswith("retriever.")]),
        ("trainer.evals", ["trainer.evals"]),
    ],
)
def test_help_of_a_key_or_a_group_explains_it(topic, keys, capsys):
    with pytest.raises(SystemExit) as end:
        read_arguments(["--help", topic, "trainer.save_freq=17"])
    lines = capsys.readouterr().out.splitlines()
    assert not end.value.code
    assert [line.split("=")[0] for line in lines if not line.startswith(" ")] == keys
    assert all(any(line.startswith("    takes ") for line in lines) for _ in keys)
    if "save_freq" in topic:
        assert lines[0] == "trainer.save_freq=17"
        assert "    takes a whole number of at least -1; default -1; set by: command line" in lines


def test_help_of_an_unknown_key_names_the_nearest():
    message = "Found no key 'trainer.sede'; the nearest known key is 'trainer.seed'"
    with pytest.raises(ValueError, match=message):
        read_arguments(["--help", "trainer.sede"])


def test_help_shows_the_values_that_are_set(capsys):
    from verl.config.command_line import read_arguments

    for option in ("--help", "--print"):
        with pytest.raises(SystemExit) as stop:
            read_arguments(["trainer.seed=41", option, "data.train_batch_size=17"])
        assert stop.value.code == 0
        text = capsys.readouterr().out
        assert "seed: 41" in text and "train_batch_size: 17" in text
        assert ("of everything random" in text) == (option == "--help")
    assert f"# {len(KEYS)} keys" in text
    assert yaml.safe_load(text) == to_dict(load_config(["trainer.seed=41", "data.train_batch_size=17"]))


def test_origins_say_where_each_value_comes_from(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text("[trainer]\nseed = 3\n")
    environment = {"VERL__DATA__PROMPT_KEY": "question", "VERL__TRAINER__SEED": "5"}
    origins = load([f"@{file}", "max_turns=1"], environment=environment).origins
    assert origins["trainer.seed"] == str(file) and origins["max_turns"] == "command line"
    assert origins["data.prompt_key"] == "environment (VERL__DATA__PROMPT_KEY)"
    assert origins["critic.model.path"] == "as actor_rollout_ref.model.path"
    assert origins["retriever.topk"] == "default"
