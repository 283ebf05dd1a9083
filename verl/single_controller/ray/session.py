"""init_ray: a Ray runtime for the time of a run, ended with it."""

from __future__ import annotations

import logging
import os

import ray

_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",  # no reports to the outside
    "RAY_AUTH_MODE": "disabled",  # otherwise Ray writes a token into the home directory
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # actors run in the driver's environment
}


class RaySession:
    """A `with` block (or a `finally: session.shutdown()`) around the use of Ray."""

    def __init__(self, owned: bool) -> None:
        self._owned = owned

    def shutdown(self) -> None:
        """Disconnects; a cluster that `init_ray` started ends. A second call does nothing."""
        if self._owned:
            self._owned = False
            ray.shutdown()

    def __enter__(self) -> RaySession:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def init_ray(num_cpus: int | None = None, log_to_driver: bool = True) -> RaySession:
    """Connects to the cluster at RAY_ADDRESS if that is set, else starts one on this machine.

    `num_cpus` is what a cluster started here offers (None: the cores of the machine); it is a count for
    scheduling, processes may be more. `log_to_driver` shows the actors' output here. If the process is
    connected already, that connection is used and left open.
    """
    if ray.is_initialized():
        return RaySession(owned=False)
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    address = os.environ.get("RAY_ADDRESS")
    if address:
        ray.init(address=address, log_to_driver=log_to_driver, logging_level=logging.WARNING)
    else:
        ray.init(
            address="local",
            num_cpus=num_cpus,
            include_dashboard=False,
            log_to_driver=log_to_driver,
            logging_level=logging.WARNING,
        )
    return RaySession(owned=True)
