"""Keys of what an action does and what it earns: the blocks `environment` and `verifiers`."""

from typing import Any

from verl.config.keys import Block, Count, NotNegative, Positive, Share, config_block, group, key


@config_block
class CodeVerifierConfig(Block):
    """The verifiers code and code_stdio."""

    api_url: str | None = key(None, "code server, or a,b,.. (null: CODE_API_URL, else one of its own)")
    max_execution_time: Positive = key(1.0, "seconds of each test")
    pass_rate_reward_threshold: Share = key(0.0, "a smaller share of passed tests is worth 0")
    apply_perf_penalty: bool = key(False, "each pass is worth (limit - runtime) / limit")
    drop_shown_tests: bool = key(False, "leave out tests that stand in the prompt, where others are left")


@config_block
class JudgeConfig(Block):
    """The verifiers general-* and rubric. The server's key is read from VERIFIERS_JUDGE_API_KEY."""

    base_url: str | None = key(None, "server with OpenAI's API, http://host:port/v1")
    model: str | None = key(None, "the model's name there")
    max_tokens: Count = key(2048, "of a judge's answer")
    temperature: NotNegative = key(1.0, "of a judge's answer")
    timeout: Positive = key(60.0, "seconds of a verdict with its retries, from when it is its turn")
    concurrency: Count = key(64, "requests of one verifier at the same time")
    prices: list[float] = key([0.0, 0.0], "US dollars per million tokens [read, written]")
    cost_limit: Positive | None = key(None, "the run stops when its judge has cost so many US dollars")


@config_block
class EnvironmentConfig(Block):
    """The environments, in which an action of the policy has its effect (verl/environments)."""

    env_class: str = key("search", "of rows without a column env_class: a name, or package.module:Class")
    max_workers: Count = key(256, "most environments at a step in threads of one process (32 in processes)")
    executor: str = key("auto", "where they run; auto: as their class says", "auto inline thread process")
    step_timeout: Positive = key(60.0, "seconds of an init or a step; then its trajectory is left out")
    max_failed_share: Share = key(0.5, "the run stops when environments fail in more of a step's rows")
    observation_format: str | None = key(None, "null: chat with a template, raw for search", "raw chat null")
    env_config: dict[str, Any] = key({}, "{environment: {its own settings}}")


@config_block
class VerifiersConfig(Block):
    """The rewards by verifiers that the rows name (verl/verifiers)."""

    max_failed_share: Share = key(0.5, "the run stops when more of a step's trajectories are not verified")
    cpu_seconds: Positive = key(5.0, "math, ifeval: processor time of a response, which is worth 0 beyond")
    length_range: Count = key(32768, "max_length, up_to_max_length: so many tokens off are worth 0")
    code: CodeVerifierConfig = group(CodeVerifierConfig)
    judge: JudgeConfig = group(JudgeConfig)
