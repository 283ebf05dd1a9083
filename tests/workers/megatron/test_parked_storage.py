"""Memory that is given back for a while: what lies in it, and views of it, are as before afterwards."""

import torch

from verl.workers.megatron.storage import ParkedStorage


def test_views_are_what_they_were_when_the_memory_is_back():
    buffer = torch.arange(12.0)
    views = [buffer[:4].view(2, 2), buffer[4:]]
    expected = [view.clone() for view in views]
    parked = ParkedStorage(views)
    parked.park()
    parked.park()  # nothing is left to give
    assert buffer.untyped_storage().nbytes() == 0
    parked.restore()
    parked.restore()
    for view, want in zip(views, expected, strict=True):
        assert torch.equal(view, want)
    views[0][0, 0] = 7.0
    assert buffer[0] == 7.0  # still views of it


def test_memory_whose_content_nobody_wants_comes_back_as_zeros():
    gradients = torch.ones(5, dtype=torch.bfloat16)
    parked = ParkedStorage([gradients], keeps=False)
    parked.park()
    parked.restore()
    assert torch.equal(gradients, torch.zeros(5, dtype=torch.bfloat16))


def test_tensors_of_one_memory_are_kept_once():
    buffer = torch.zeros(3)
    parked = ParkedStorage([buffer, buffer[1:], torch.zeros(0)])
    parked.park()
    parked.restore()
    assert torch.equal(buffer, torch.zeros(3))
