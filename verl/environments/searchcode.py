"""Questions for which the policy may search and compute.

    <tool><search>QUERY</search></tool>       documents come back: {"result": "Doc 1: ...\nDoc 2: ..."}
    <tool><python>PROGRAM</python></tool>     what the program printed comes back
    <solution>... #### N</solution>           ends the episode

The reward comes at the end. It is 1 if the number after the first `####` that the policy wrote outside of its
tool calls is right, and 0 otherwise. A number that a tool returned earns nothing. A program runs on the code
server, without network and without the trainer's environment. A search that fails ends the episode, which
then leaves the batch.

`env_config`: {"search_url": an address or a,b,.., "topk": 3, "timeout": 30 seconds for a search,
"seconds": 10 for a program}. Without a `search_url` the address is that of RETRIEVER_URL, else
http://127.0.0.1:8000/retrieve.
"""

import json
import os
import re
from collections.abc import Mapping
from typing import Any

from verl.code_server.client import CodeClient, ask
from verl.environments.environment import (
    BaseTextEnv,
    BaseTextEnvStepOutput,
    ToolGroup,
    gold_text,
    tool,
)
from verl.environments.gsm8k import extract_number
from verl.utils.rows import row_max_turns

DEFAULTS = {"topk": 3, "timeout": 30.0, "seconds": 10.0}
LOCAL_SEARCH = "http://127.0.0.1:8000/retrieve"
MAX_CHARACTERS = 9_000  # the most of a program's output that the policy is shown

_TOOL = re.compile(r"<tool>(.*?)</tool>", re.DOTALL)
_CALL = re.compile(r"<(\w+)>(.*?)</\1>", re.DOTALL)


class SearchGroup(ToolGroup):
    """The tool `search`, which asks a server with Search-R1's /retrieve."""

    def __init__(self, url: str, topk: int, timeout: float) -> None:
        super().__init__("SearchToolGroup")
        self.urls = url.split(",")
        self.topk = topk
        self.timeout = timeout

    @tool
    def search(self, query: str) -> str:
        """Return the documents for a query as JSON text.

        Raises CouldNotVerify if the server does not answer with documents.
        """
        request = {"queries": [query.strip()], "topk": self.topk, "return_scores": True}
        texts = ask(self.urls, "", request, self.timeout, read_contents)
        documents = "".join(f"Doc {index}: {text}\n" for index, text in enumerate(texts, 1))
        return json.dumps({"result": documents or "No search results found."})


def read_contents(reply: Any) -> list[str]:
    return [str(hit["document"]["contents"]).strip() for hit in reply["result"][0]]


class PythonGroup(ToolGroup):
    """The tool `python`, which runs a program on the code server."""

    def __init__(self, client: CodeClient, seconds: float) -> None:
        super().__init__("PythonCodeExecutorToolGroup")
        self.client = client
        self.seconds = seconds

    @tool
    def python(self, code: str) -> str:
        """Run a program, and return what it printed or what went wrong.

        Raises CouldNotVerify if the code server gives no answer.
        """
        printed, outcome = self.client.run(code, stdin="", limit=self.seconds)
        printed = printed.strip()
        if len(printed) > MAX_CHARACTERS:
            printed = printed[:MAX_CHARACTERS] + "\n(the rest is left out: too long)"
        return printed if outcome == "passed" else f"The program failed ({outcome}). {printed}".strip()


class SearchCodeEnv(BaseTextEnv):
    """One question for which the policy may call both tools."""

    stop = ("</tool>", "</solution>")
    counts_turns = True
    max_turns = 2

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None):
        super().__init__()
        config = {**DEFAULTS, **(env_config or {})}
        self.gold = gold_text(extras)
        self.actions = list[str]()
        self.max_turns = row_max_turns(extras or {}) or type(self).max_turns
        url = config.get("search_url") or os.environ.get("RETRIEVER_URL") or LOCAL_SEARCH
        search = SearchGroup(str(url), int(config["topk"]), float(config["timeout"]))
        python = PythonGroup(CodeClient(config.get("code_api_url")), float(config["seconds"]))
        self.init_tool_groups([search, python])

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.actions.append(action)
        if len(self.actions) >= self.max_turns or ("<solution>" in action and "</solution>" in action):
            answer = extract_number("\n".join(_TOOL.sub("", text) for text in self.actions))
            reward = float(answer == self.gold)
            return {"observations": [], "reward": reward, "done": True, "metadata": {}}
        block = _TOOL.search(action)
        call = _CALL.search(block[1]) if block else None
        name, tool_input = (call[1], call[2].strip()) if call else (None, "")
        group = self.tool_to_toolgroup.get(name) if name else None
        if name is None:
            text = "There is no tool call. Write <tool><search>QUERY</search></tool> or <tool><python>..."
        elif group is None:
            text = f"There is no tool {name!r}; there are {', '.join(self.tool_to_toolgroup)}."
        else:
            text = self._execute_tool(group, name, [tool_input])
        observations = [{"role": "user", "content": text}] if text else []
        metadata = {"tool_group": group, "tool_name": name, "tool_input": tool_input}
        return {"observations": observations, "reward": 0.0, "done": False, "metadata": metadata}
