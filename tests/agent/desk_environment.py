"""A desk with tickets and tools, for tests of what a trajectory is tagged with."""

from __future__ import annotations

import json
import re

from verl.environments.environment import BaseTextEnv
from verl.utils.errors import CouldNotVerify

ARGUMENTS = [
    "Error: close_ticket() missing 1 required positional argument: 'reason'",
    '{"error": "Invalid parameter: reason is required"}',
    "400 Bad Request: field `reason` must be a string",
    "ValidationError: 1 validation error for CloseTicket",
    '{"status": 422, "message": "reason: expected a string"}',
    "TypeError: close_ticket() got an unexpected keyword argument 'why'",
]
ACCESS = [
    "Error 403: you are not allowed to close this ticket",
    '{"error": {"code": 401, "message": "login required"}}',
    "Unauthorized: your token has expired",
    "AccessDenied: missing credentials",
    '{"success": false, "message": "Permission denied for ticket"}',
    "You are not authorized to do this.",
]
ABSENT = [
    "Error: ticket 999 does not exist",
    '{"error": "404 Not Found"}',
    "No such ticket: 999",
    "The ticket 999 could not be found.",
    '{"ok": false, "detail": "unknown ticket 999: not found"}',
    "LookupError: no records with this id",
]
PLAIN = [
    '{"id": %d, "text": "The page says error 404, not found, when I log in. Permission denied on my share."}',
    "Ticket %d, open since Monday. The printer on floor two has no paper; please bring some.",
    '{"id": %d, "error": null, "text": "Invalid password after the holidays"}',
    "Ticket %d is about a form whose field `amount` is too small on phones.",
]
CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


class Desk(BaseTextEnv):
    """The row says which words the tools use (`words`). Ticket 7 is to be closed, 13 is locked, 999 is not
    there, 1000 is long. A turn without a call ends the episode.
    """

    runs = "inline"
    stop = ("</tool_call>",)
    max_turns = 6

    def __init__(self, env_config=None, extras=None):
        super().__init__()
        self.words = extras["words"]
        self.closed = False

    def step(self, action):
        call = CALL.search(action)
        if call is None and "<tool_call>" not in action:
            if "unsure" in action:
                raise CouldNotVerify("the judge is away")
            return {"observations": [], "reward": float(self.closed), "done": True, "metadata": {}}
        text = "I can't read this call." if call is None else self.answer(json.loads(call[1]))
        return {
            "observations": [{"role": "user", "content": f"<tool_response>{text}</tool_response>"}],
            "reward": 0.0,
            "done": False,
            "metadata": {},
        }

    def answer(self, call):
        name = call["name"]
        arguments = call["arguments"]
        if arguments.get("id") == 999:
            return ABSENT[self.words % len(ABSENT)]
        if name == "close_ticket" and set(arguments) != {"id", "reason"}:
            return ARGUMENTS[self.words % len(ARGUMENTS)]
        if arguments["id"] == 13:
            return ACCESS[self.words % len(ACCESS)]
        if arguments["id"] == 1000:
            return "Ticket 1000: " + "a long story, " * 30
        self.closed = self.closed or (name == "close_ticket" and arguments["id"] == 7)
        return "Closed." if name == "close_ticket" else PLAIN[self.words % len(PLAIN)] % arguments["id"]
