"""What `bash scripts/ray_node.sh` is told on its command line and could not heed is refused in one line."""

import pytest

pytest.importorskip("ray")

from verl.single_controller.ray import node


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("head --address 127.0.0.1", "--address 127.0.0.1: expected the address of this node's network card"),
        ("worker --head alpha:6379 --address ::1", "--address ::1: expected"),
        ("worker --address alpha:6379", "reach, without a port"),
        ("head --head alpha:6379", "--head is for a worker"),
        ("worker --head alpha:6379 --port 6380", "--port is for a head"),
    ],
)
def test_what_can_not_be_heeded_is_refused(line, says, capsys, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(SystemExit, match="2"):
        node._arguments(line.split())
    assert says in capsys.readouterr().err


def test_a_workers_head_is_ray_address_unless_it_is_given(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "alpha:6379")
    assert node._arguments(["worker"])[0].head == "alpha:6379"
    assert node._arguments(["worker", "--head", "beta:6379", "--address", "fd00::1"])[0].head == "beta:6379"
    assert node._arguments(["head", "--port", "6380"])[0].port == 6380
