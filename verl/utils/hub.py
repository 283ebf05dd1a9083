"""The hub of models and data sets, which all programs ask in one way.

    model --(a folder here)-------------------------------> the hub is not asked
    name  --(the hub answers within seconds)--------------> it is loaded, and fetched if need be
          --(silence, a refusal; all names are cached)----> HF_HUB_OFFLINE=1 for this process, with one line
          --(silence, a refusal; one name is nowhere)-----> ValueError that says what to fetch, and how

A program calls `use_cache_if_hub_is_away` before it loads models by name. The preflight does it for training.
huggingface_hub by itself asks for each file, waits ten seconds for each answer, and tries again.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from verl.utils import outside
from verl.utils.text import printable

_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


class HubTrouble(NamedTuple):
    """The reason why names can't be loaded from the hub, and what that means.

    Attributes:
        problem: What is wrong, such as "https://huggingface.co does not answer (ConnectTimeout)".
        missing: The names that are not in the cache, by their settings. If it is empty, all can be loaded
            without the hub.
    """

    problem: str
    missing: dict[str, str]

    @property
    def remedy(self) -> str:
        """Return what to type for the names that are missing."""
        commands = " && ".join(f"hf download {name}" for name in dict.fromkeys(self.missing.values()))
        return f"on a machine with network: {commands} (same HF_HOME)"


def is_hub_name(model: str) -> bool:
    """Return whether a model is given by its name on the hub, and not as a folder."""
    return _NAME.fullmatch(model) is not None and not Path(model).exists()


def local_folder(model: str) -> Path | None:
    """Return the folder of a model's files, which may be in the hub's cache.

    Returns None if the model would have to be fetched.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    if Path(model).is_dir():
        return Path(model)
    try:
        return Path(snapshot_download(model, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def look_at_hub(models: Mapping[str, str]) -> HubTrouble | None:
    """Ask the hub for models, and return the trouble, or None. The first trouble ends the asking.

    Args:
        models: The models by the settings that name them. Folders among them are left out.
    """
    names = {setting: model for setting, model in models.items() if is_hub_name(model)}
    problem = next(filter(None, map(hub_problem, dict.fromkeys(names.values()))), None)
    if problem is None:
        return None
    missing = {setting: name for setting, name in names.items() if local_folder(name) is None}
    return HubTrouble(problem, missing)


def trouble_with_cached(models: Mapping[str, str]) -> HubTrouble | None:
    """Return the trouble with the hub, or None. All models are in the cache if there is trouble.

    Args:
        models: The models by the settings that name them, such as {"--retriever_model": "intfloat/e5-base"}.

    Raises:
        ValueError: If a model is neither in the cache nor to be had from the hub.
    """
    trouble = look_at_hub(models)
    if trouble is not None and trouble.missing:
        listed = ", ".join(f"{setting}={name}" for setting, name in trouble.missing.items())
        raise ValueError(f"{listed} is not in the hub's cache, and {trouble.problem}; {trouble.remedy}")
    return trouble


def use_cache_if_hub_is_away(models: Mapping[str, str]) -> None:
    """Let this process load models without the hub, with one line on stderr, if the hub does not give them.

    The models are all that the process loads by name: from then on it asks the hub for none. Arguments and
    exceptions are those of `trouble_with_cached`.
    """
    trouble = trouble_with_cached(models)
    if trouble is not None and not is_offline():
        print(printable(f"note: {trouble.problem}; the cache is used"), file=sys.stderr, flush=True)
        leave_hub_alone()


def is_offline() -> bool:
    """Return whether this process does not ask the hub."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def leave_hub_alone() -> None:
    """Set HF_HUB_OFFLINE for this process, and for all that it starts or carries its variables to."""
    from huggingface_hub import constants

    os.environ["HF_HUB_OFFLINE"] = "1"
    constants.HF_HUB_OFFLINE = True


def hub_problem(
    name: str, file: str = "config.json", repo_type: str = "model", may_lack: bool = False
) -> str | None:
    """Return why the hub does not give a file, in words, or None if it does.

    The hub is asked as a load would ask it: with its proxies, certificates and token.

    Args:
        name: The repository.
        file: A file in it.
        repo_type: "model" or "dataset".
        may_lack: Whether the repository may have no such file, so that 404 is an answer too.
    """
    from huggingface_hub import constants, get_session, hf_hub_url
    from huggingface_hub.utils import build_hf_headers

    if is_offline():
        return "HF_HUB_OFFLINE (or TRANSFORMERS_OFFLINE) is set"
    endpoint = constants.ENDPOINT
    url = hf_hub_url(name, file, repo_type=repo_type)

    def ask() -> int:
        reply = get_session().head(url, headers=build_hf_headers(), timeout=outside.ANSWER_SECONDS)
        return int(reply.status_code)

    status = outside.status_of(endpoint, ask)
    if isinstance(status, str):
        return status
    if status < 400 or (status == 404 and may_lack):
        return None
    hint = " (a wrong name, a token that may not read it, or a proxy)" if status in (401, 403, 404) else ""
    return f"{endpoint} answers {status} for {name}{hint}"
