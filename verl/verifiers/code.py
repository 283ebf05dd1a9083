"""Verifiers of programs, which a code server runs: code (asserts), code_stdio (standard input and output).

The program is the last ``` block of the response, or else all of it. The score is the share of tests that it
passes. A share below `verifiers.code.pass_rate_reward_threshold` is worth 0. With `apply_perf_penalty` each
pass is worth (limit - runtime) / limit. A program that fails, hangs or does harm gets 0 for its tests. If the
server is away or gives no whole answer, the response could not be verified. The label is a list of tests,
JSON text of one, or Open-Instruct's packed text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from verl.code_server.client import CodeClient
from verl.utils.errors import CouldNotVerify
from verl.verifiers.verifier import Sample, Verdict, Verifier, VerifierSettings

_BLOCK = re.compile(r"```(?:python)?(.*?)```", re.DOTALL)


class CodeVerifier(Verifier):
    """The verifiers `code` and `code_stdio`.

    All programs are sent at once. The server lets them wait, and starts their clocks.
    """

    def open(self, settings: VerifierSettings) -> None:
        self.config = settings.config.code
        self.client = CodeClient(self.config.api_url)

    def check_label(self, label: Any) -> None:
        tests = read_tests(label)
        kind = dict if self.name == "code_stdio" else str
        if not tests or not isinstance(tests, str) and not all(isinstance(test, kind) for test in tests):
            expected = '{"input", "output"} each' if kind is dict else "texts of asserts"
            raise ValueError(f"Found {self.name} label {label!r:.200}; expected a list of tests, {expected}.")

    def verify_many(self, samples: Sequence[Sample]) -> list[Verdict]:
        with ThreadPoolExecutor(min(max(len(samples), 1), 256), self.name) as pool:
            return list(pool.map(self.verify, samples))

    def verify(self, sample: Sample) -> Verdict:
        config = self.config
        tests = read_tests(sample.label)
        if config.drop_shown_tests and not isinstance(tests, str):
            hidden = []
            for test in tests:  # A prompt shows a test by its text, or by both its input and its output.
                texts = [test["input"], test["output"]] if isinstance(test, dict) else [test]
                hidden += [] if all(str(text).strip() in sample.query for text in texts) else [test]
            tests = hidden or tests  # If all are shown, there is nothing else to go by.
        limit = config.max_execution_time
        blocks = _BLOCK.findall(sample.text)
        program = blocks[-1].strip() if blocks else sample.text
        try:
            passed, seconds = self.client.test(program, tests, self.name == "code_stdio", limit)
        except CouldNotVerify as error:
            return Verdict(None, str(error))
        rate = sum(passed) / max(len(passed), 1)
        score = rate if rate >= config.pass_rate_reward_threshold else 0.0
        if config.apply_perf_penalty and score > 0:  # runtimes are -1 where a test failed
            values = [max(limit - runtime, 0.0) / limit for runtime in seconds]
            score = sum(is_pass * value for is_pass, value in zip(passed, values, strict=True)) / len(passed)
        return Verdict(score, f"{sum(passed)} of {len(passed)} tests passed")


def read_tests(label: Any) -> list[Any] | str:
    """Return the tests of a label, or the text that the server unpacks.

    A label may be one test alone, because a list of one label is read as the label.
    """
    if isinstance(label, str):
        try:
            label = json.loads(label)
        except ValueError:
            return [label] if label.lstrip().startswith("assert") else label
    return [label] if isinstance(label, Mapping) else list(label)
