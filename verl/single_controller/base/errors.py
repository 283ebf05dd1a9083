"""What can happen to the process of a rank. Here, so that a run without Ray can name them too."""

from __future__ import annotations


class WorkerFailedError(RuntimeError):
    """Which rank raised, and its traceback; the cause of the exception that is raised."""


class WorkerDiedError(RuntimeError):
    """The process of a rank, or its node, is gone in the middle of a call or before it.

    Its state is lost: nothing is tried again. Shut the group down and build it anew.
    """


class ConnectionLostError(WorkerDiedError):
    """A rank lost its connection to another one, and it is not known which process or node is gone."""
