"""Parts that the backends share: workers, the table of registered methods, groups and pools."""

# ruff: noqa: F401

from verl.single_controller.base.decorator import DataPosition, Dispatch, Execute, register
from verl.single_controller.base.worker import Worker
from verl.single_controller.base.worker_group import (
    ClassWithInitArgs,
    ResourcePool,
    WorkerDiedError,
    WorkerFailedError,
    WorkerGroup,
    create_colocated_worker_cls,
)
