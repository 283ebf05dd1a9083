"""The picture of a run."""

import pytest

from verl.records.curves import controlled_sets, draw_curves, environments_in, panels_of


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [{"step": 0, "val/greedy/em": 0.1}],
        [
            {"step": i, "train/em": 0.1, "critic/score/mean": -2.0, "actor/entropy_loss": None}
            for i in range(30)
        ],
        [
            {"step": i, "val/sampled/em": 0.9, "eval/val/shuffled/em": 0.1, "eval/val/empty/em": 0.0}
            for i in (4, 8)
        ],
        [{"step": i, **{f"env/{name}/reward": i / 9 - 0.5 for name in "abcde"}} for i in range(9)],
    ],
    ids=["nothing yet", "validation only", "strange rewards", "controls", "five environments"],
)
def test_a_picture_is_drawn_of_whatever_is_there(rows, tmp_path):
    draw_curves(rows, tmp_path / "new" / "curves.png", "a run")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["curves.png"]
    assert len((tmp_path / "new" / "curves.png").read_bytes()) > 10_000


def test_a_branch_that_a_run_has_left_is_drawn_beside_the_run(tmp_path):
    rows = [{"step": step, "train/em": step / 20} for step in range(20)]
    left = [{"step": step, "train/em": 0.0} for step in range(10, 14)]
    draw_curves(rows, tmp_path / "alone.png", "a run")
    draw_curves(rows, tmp_path / "both.png", "a run", [left])
    assert (tmp_path / "alone.png").read_bytes() != (tmp_path / "both.png").read_bytes()


def test_a_run_in_environments_has_their_rewards_and_turns_in_its_panels():
    rows = [{"step": 1, "env/text2sql/reward": 0.1, "env/text2sql/turns": 2.0, "train/em": 0.0}]
    environments = environments_in(rows)
    panels = panels_of(environments)
    assert environments == ["text2sql"] and list(panels)[:2] == ["Reward", "Turns per episode"]
    assert list(panels["Reward"]) == ["env/text2sql/reward"]
    assert "Searches per question" in panels_of(["search", "text2sql"])
    assert list(panels_of([]))[:2] == ["Right answers and reward", "Searches per question"]


def test_the_validation_of_an_environment_is_drawn(tmp_path):
    rows = [{"step": step, "env/text2sql/reward": step / 9} for step in range(9)]
    draw_curves(rows, tmp_path / "training.png", "a run")
    draw_curves([*rows, {"step": 9, "val/test_score/text2sql": 0.5}], tmp_path / "both.png", "a run")
    assert (tmp_path / "training.png").read_bytes() != (tmp_path / "both.png").read_bytes()


def test_controls_are_curves_that_say_what_their_searches_found():
    def labels(*metrics):
        return {name: label for name, (label, _, _) in controlled_sets([dict.fromkeys(metrics, 0.5)]).items()}

    assert labels("eval/val/shuffled/em", "eval/val/empty/em", "eval/val/empty/f1", "eval/other/em") == {
        "eval/val/shuffled/em": "exact match, shuffled passages",
        "eval/val/empty/em": "exact match, no passages",
    }
    assert labels("eval/held/em", "eval/held/empty/em", "eval/far/shuffled/em", "eval/plain/em") == {
        "eval/far/shuffled/em": "exact match, shuffled passages (far)",
        "eval/held/empty/em": "exact match, no passages (held)",
        "eval/held/em": "exact match, own passages (held)",
    }
    assert labels("eval/held/em") == {}
    styles = controlled_sets([{"eval/a/em": 0, "eval/a/empty/em": 0}, {"eval/a/shuffled/em": 0}]).values()
    assert len({colour for _, colour, _ in styles}) == len({marker for _, _, marker in styles}) == 3
