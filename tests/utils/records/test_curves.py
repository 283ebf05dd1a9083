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
