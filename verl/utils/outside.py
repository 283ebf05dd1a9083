"""Services outside of the machine (a hub, wandb), which may be silent: they are asked within two seconds."""

from __future__ import annotations

import threading
from collections.abc import Callable

ANSWER_SECONDS = 2.0


def status_of(address: str, ask: Callable[[], int]) -> int | str:
    """Return the HTTP status with which a service answers, or in words why it does not answer.

    A thread waits for the answer, as nothing limits the time in which a machine looks up a host's name.

    Args:
        address: The service's address, for the words.
        ask: Sends the request, with ANSWER_SECONDS as its timeout, and returns the status.
    """
    answers: list[int | str] = []

    def wait() -> None:
        try:
            answers.append(ask())
        except Exception as error:  # the HTTP library's, and those of a bad address, proxy or certificate
            answers.append(f"{address} does not answer ({type(error).__name__})")

    thread = threading.Thread(target=wait, name="asks outside", daemon=True)
    thread.start()
    thread.join(ANSWER_SECONDS)
    return answers[0] if answers else f"{address} does not answer within {ANSWER_SECONDS:g} s"
