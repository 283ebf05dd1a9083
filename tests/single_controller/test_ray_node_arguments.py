"""What `bash scripts/ray_node.sh` is told on its command line and could not heed is refused in one line."""

import pytest

pytest.importorskip("ray")

from verl.single_controller.ray import node


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("head --address 127.0.0.1", "--address 127.0.0.1 reaches this machine alone"),
        ("head --address localhost", "leave it out, or give the address of the network card"),
        ("worker --head alpha:6379 --address ::1", "--address ::1 reaches this machine alone"),
        ("worker --address alpha:6379", "Expected --head alpha:6379"),
        ("head --address 10.0.0.1:6380", "Expected --address and --port apart"),
        ("head --head alpha:6379", "--head alpha:6379 is for a worker"),
        ("worker --head alpha:6379 --port 6380", "--port is the head's"),
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
