"""A process that takes weights from a group, for tests."""

import os
import signal
from multiprocessing import get_context

import torch

from verl.workers.rollout.collective import CollectiveReader

CPU = torch.device("cpu")


class Dying(CollectiveReader):
    """A member that is killed in the midst of its first bucket."""

    def _receive_bytes(self, group, point, num_bytes, give_up):
        group.members.broadcast(torch.empty(num_bytes, dtype=torch.uint8), 0)
        os.kill(os.getpid(), signal.SIGKILL)


def bits(pairs):
    """Names, dtypes, shapes and bytes of tensors."""
    return [
        (name, str(x.dtype), list(x.shape), bytes(x.contiguous().reshape(-1).view(torch.uint8).numpy()))
        for name, x in pairs
    ]


def _answer(rank, dies, points, answers):
    torch.set_num_threads(1)
    reader = Dying(rank, CPU) if dies else CollectiveReader(rank, CPU)
    while (point := points.get()) is not None:
        answers.put(bits(reader.read(point, 60)))
    reader.close()


class Member:
    """A process that reads what it is told to, one version after the other."""

    def __init__(self, rank, dies=False):
        context = get_context("fork")  # it has no thread of torch, and need not import it again
        self.points = context.Queue()
        self.answers = context.Queue()
        arguments = (rank, dies, self.points, self.answers)
        self.process = context.Process(target=_answer, args=arguments, daemon=True)
        self.process.start()

    def end(self):
        self.points.put(None)
        self.process.join(30)
        self.process.kill()
