"""Several roles in the same processes: one worker class that holds one worker per role.

create_colocated_worker_cls({"actor": ClassWithInitArgs(A, ..), "critic": ClassWithInitArgs(C, ..)})
  -> a class with the methods actor_update, critic_update, ...; a group over it gives by
     `spawn(["actor", "critic"])` one group per role, with the methods' own names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from verl.single_controller.base.decorator import REGISTRATION_ATTRIBUTE, registered_methods
from verl.single_controller.base.worker import Worker
from verl.single_controller.base.worker_group import ClassWithInitArgs, method_prefix


class ColocatedWorker(Worker):
    """One worker per role, made in the order given, in one process."""

    def __init__(self, roles: Mapping[str, ClassWithInitArgs]) -> None:
        super().__init__()
        self.workers = {role: cls_with_init() for role, cls_with_init in roles.items()}

    def close(self) -> None:
        """Closes the workers, the last one first."""
        for worker in reversed(self.workers.values()):
            worker.close()


def create_colocated_worker_cls(class_dict: Mapping[str, ClassWithInitArgs]) -> ClassWithInitArgs:
    """The class of workers that hold all these roles, with its arguments."""
    if not class_dict:
        raise ValueError("at least one role is needed")
    namespace: dict[str, Any] = {"role_classes": {role: item.cls for role, item in class_dict.items()}}
    for role, item in class_dict.items():
        for name, registration in registered_methods(item.cls).items():
            full_name = method_prefix(role) + name
            if full_name in namespace:
                raise ValueError(
                    f"two roles of {list(class_dict)} have a method {full_name!r}; rename a role"
                )
            namespace[full_name] = _forward(role, name)
            setattr(namespace[full_name], REGISTRATION_ATTRIBUTE, registration)
    cls = type(f"Colocated_{'_'.join(class_dict)}", (ColocatedWorker,), namespace)
    return ClassWithInitArgs(cls, dict(class_dict))


def _forward(role: str, name: str) -> Callable[..., Any]:
    def method(self: ColocatedWorker, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.workers[role], name)(*args, **kwargs)

    method.__name__ = method_prefix(role) + name
    return method
