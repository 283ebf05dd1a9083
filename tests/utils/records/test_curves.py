"""The picture of a run."""

import numpy as np
import pytest

from verl.utils.records.curves import draw_curves, moving_mean


def test_the_moving_mean_is_a_mean_of_neighbours():
    values = np.arange(5.0)
    assert moving_mean(values, 1).tolist() == values.tolist()
    assert moving_mean(values, 3).tolist() == [0.5, 1.0, 2.0, 3.0, 3.5]


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [{"step": 0, "val/greedy/em": 0.1}],
        [
            {"step": i, "train/em": 0.1, "critic/score/mean": -2.0, "actor/entropy_loss": None}
            for i in range(30)
        ],
    ],
    ids=["nothing yet", "validation only", "strange rewards"],
)
def test_a_picture_is_drawn_of_whatever_is_there(rows, tmp_path):
    draw_curves(rows, tmp_path / "new" / "curves.png", "a run")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["curves.png"]
    assert len((tmp_path / "new" / "curves.png").read_bytes()) > 10_000


def test_the_picture_shows_the_curve(tmp_path):
    """The blue of a rising line is low at the left and high at the right."""
    from matplotlib.image import imread

    rows = [{"step": i, "train/em": i / 100, "critic/score/mean": i / 100} for i in range(101)]
    draw_curves(rows, tmp_path / "c.png", "a run")
    picture = imread(tmp_path / "c.png")[: 910 // 2, : 1430 // 2, :3]
    blue = np.abs(picture - np.array([0x00, 0x72, 0xB2]) / 255).sum(-1) < 0.02
    where, columns = np.nonzero(blue)
    left, right = columns < columns.min() + 40, columns > columns.max() - 40
    assert where[left].mean() > where[right].mean() + 150
