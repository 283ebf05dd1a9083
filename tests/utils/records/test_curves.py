"""The picture of a run."""

import pytest

from verl.utils.records.curves import draw_curves


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [{"step": 0, "val/greedy/em": 0.1}],
        [
            {"step": i, "train/em": 0.1, "critic/score/mean": -2.0, "actor/entropy_loss": None}
            for i in range(30)
        ],
        [{"step": i, **{f"env/{name}/reward": i / 9 - 0.5 for name in "abcde"}} for i in range(9)],
    ],
    ids=["nothing yet", "validation only", "strange rewards", "five environments"],
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
