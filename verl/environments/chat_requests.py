"""The messages of OpenAI's chat API as clients may send them, and the request of an agent's episode."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

Text = Annotated[str, Field(max_length=1 << 26)]
StopString = Annotated[str, Field(min_length=1, max_length=256)]


class ContentPart(BaseModel):
    type: Literal["text", "input_text", "output_text"]
    text: Text


class CalledFunction(BaseModel):
    name: Text
    arguments: Text


class ToolCall(BaseModel):
    id: Text | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(BaseModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[ContentPart] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: Text | None = None
    name: Text | None = None


class AgentRequest(BaseModel, extra="allow"):
    """The body of requests to the endpoint of an agent's episode.

    The run decides how the policy samples.
    """

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    stop: StopString | list[StopString] | None = None
