"""The requests that clients may send, checked at the border: no number that passes here breaks the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from verl.environments.chat_requests import ChatMessage, StopString, Text
from verl.inference.chat import ChatCodec
from verl.sessions.engine_contract import SamplingParams
from verl.utils.text import encodable_json

MAX_CHOICES = 128  # of one request
MAX_INTEGER = 2**62
MAX_TOP_LOG_PROBS = 20
_REFUSED = {  # parameters that this engine does not support
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "min_tokens"),
    *("top_logprobs", "prompt_logprobs", "best_of", "suffix", "functions", "audio"),
    *("modalities", "response_format", "structured_outputs", "guided_json", "guided_regex"),
    "chat_template_kwargs",
}
_USUAL = {"best_of": 1, "repetition_penalty": 1, "modalities": ["text"], "response_format": {"type": "text"}}
Texts = Annotated[list[Text], Field(min_length=1)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]


class StreamOptions(BaseModel):
    include_usage: bool | None = None


class Sampling(BaseModel):
    """The sampling parameters of all routes.

    A temperature of 0 is greedy. A top_k of -1 or 0 is off. Without a seed the server draws one.
    `drawn_before` is the number of tokens that the client has drawn with the seed in earlier requests.
    `stop_token_ids` end a turn beside the model's own end of sequence, also with ignore_eos.
    """

    model_config = ConfigDict(extra="allow")

    max_tokens: Annotated[int, Field(ge=1, le=MAX_INTEGER)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-MAX_INTEGER, le=MAX_INTEGER)] | None = None
    drawn_before: Annotated[int, Field(ge=0, le=MAX_INTEGER)] = 0
    stop: StopString | Annotated[list[StopString], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1000)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None

    @model_validator(mode="after")
    def _check(self) -> Sampling:
        if self.temperature is not None and 0 < self.temperature < 0.01:
            raise ValueError(f"temperature is {self.temperature}; expected 0 (greedy), or 0.01 and more")
        for name, value in (self.model_extra or {}).items():
            if name in _REFUSED and value and value != _USUAL.get(name):
                raise ValueError(f"{name} is not supported by this server; leave it out")
        return self

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    def params(self, codec: ChatCodec, seed: int, max_tokens: int, drawn_before: int = 0) -> SamplingParams:
        """Return the parameters for the engine. `max_tokens` is used if the client gives no number."""
        names = {"max_tokens", "temperature", "top_p", "top_k", "min_p"}
        given: dict[str, Any] = {"max_tokens": max_tokens} | self.model_dump(include=names, exclude_none=True)
        stop = codec.codec.stop(tuple(self.stops))
        own_eos = frozenset() if self.ignore_eos else codec.codec.eos_token_ids
        eos = own_eos | frozenset(self.stop_token_ids or ())
        seed &= 2**63 - 1
        drawn_before += self.drawn_before
        return SamplingParams(**given, seed=seed, drawn_before=drawn_before, stop=stop, eos_token_ids=eos)


class ToolFunction(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: Text
    description: Text | None = None
    parameters: dict[str, Any] | None = None


class ToolDescription(BaseModel):
    type: Literal["function"]
    function: ToolFunction


class ChatRequest(Sampling):
    """The body of POST /v1/chat/completions.

    logprobs asks for those of the sampled tokens. A tool_choice of "none" hides the tools. Nothing forces the
    policy to call one.
    """

    model: Text | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    tools: list[ToolDescription] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_INTEGER)] | None = None
    logprobs: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _one_limit(self) -> ChatRequest:
        if self.max_completion_tokens is not None:
            self.max_tokens = self.max_completion_tokens
        return self

    def history(self) -> list[dict[str, Any]]:
        """Return the messages as plain data, without what is not set."""
        messages = [message.model_dump(exclude_none=True) for message in self.messages]
        return [
            message | {"role": "system"} if message["role"] == "developer" else message
            for message in messages
        ]

    def visible_tools(self) -> list[dict[str, Any]] | None:
        if not self.tools or self.tool_choice == "none":
            return None
        return [encodable_json(tool.model_dump(exclude_none=True)) for tool in self.tools]


class GenerateRequest(BaseModel):
    """The body of POST /inference/v1/generate, as vLLM has it.

    Fields that change nothing here are ignored.
    """

    model_config = ConfigDict(extra="allow")

    token_ids: TokenIds
    sampling_params: Sampling | None = None
    model: Text | None = None

    @model_validator(mode="after")
    def _text_alone(self) -> GenerateRequest:
        for name in ("stream", "features", "content_parts"):
            if (self.model_extra or {}).get(name):
                raise ValueError(f"{name} is not supported by this server; leave it out")
        return self


class CompletionRequest(Sampling):
    """The body of POST /v1/completions.

    `logprobs` is the number of the most probable tokens that are given beside each token. `echo` puts the
    prompt before the text, with the log-probs of its tokens. With it `max_tokens` may be 0.
    """

    max_tokens: Annotated[int, Field(ge=0, le=MAX_INTEGER)] | None = None
    model: Text | None = None
    prompt: Text | TokenIds | Texts | Annotated[list[TokenIds], Field(min_length=1)]
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOG_PROBS)] | None = None
    echo: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _is_possible(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens is 0; expected 1 or more without echo")
        if self.echo and self.stream:
            raise ValueError("echo is not supported in a stream; leave one of them out")
        return self

    @property
    def needs_scores(self) -> bool:
        """Return whether the answer has log-probs that sampling does not give."""
        return bool(self.logprobs) or (bool(self.echo) and self.logprobs is not None)

    def prompts(self, encode: Callable[[str], list[int]]) -> list[list[int]]:
        prompt: Any = self.prompt
        prompts = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
        return [encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]


class FinishRequest(BaseModel):
    """The outcome of a session. turn_rewards has one reward for each turn, in the order of the segments."""

    reward: Annotated[float, Field(allow_inf_nan=False)]
    turn_rewards: list[Annotated[float, Field(allow_inf_nan=False)]] | None = None
    metadata: dict[str, Any] | None = None
