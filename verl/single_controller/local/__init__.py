"""The in-process backend."""

from verl.single_controller.local.worker_group import LocalWorkerGroup

__all__ = ["LocalWorkerGroup"]
