"""Verifiers of programs, which a code server runs: code (asserts), code_stdio (standard input and output).

The program is the last ``` block of the response, or else all of it. The score is the share of tests that it
passes. A share below `verifiers.code.pass_rate_reward_threshold` is worth 0. With `apply_perf_penalty` each
pass is worth (limit - runtime) / limit. A program that fails, hangs or does harm gets 0 for its tests. If the
server is away, gives no whole answer or could not judge a test, the response could not be verified. The label
is a list of tests, JSON text of one, or Open-Instruct's packed text.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from verl.code_server.client import CodeClient
from verl.utils.errors import CouldNotVerify
from verl.verifiers.verifier import Sample, Verdict, Verifier, VerifierSettings

_BLOCK = re.compile(r"```(?:python)?(.*?)```", re.DOTALL)
ALL_PASSED = re.compile(r"(\d+) of \1 tests passed")
MAX_SOLUTIONS = 200  # the number of rows' own solutions that are tried before a run

log = logging.getLogger(__name__)


class CodeVerifier(Verifier):
    """The verifiers `code` and `code_stdio`.

    All programs are sent at once. The server lets them wait, and starts their clocks.
    """

    def open(self, settings: VerifierSettings) -> None:
        self.config = settings.config.code
        self.client = CodeClient(self.config.api_url)

    def check_label(self, label: Any) -> None:
        tests = read_tests(label)
        is_stdio = self.name == "code_stdio"
        is_test = is_stdio_test if is_stdio else lambda test: isinstance(test, str)
        if not tests or not (isinstance(tests, str) or all(map(is_test, tests))):
            expected = '{"input", "output"} each, which are texts' if is_stdio else "texts of asserts"
            raise ValueError(f"Found {self.name} label {label!r:.200}; expected a list of tests, {expected}.")

    def check_solutions(self, samples: Sequence[Sample]) -> None:
        step = -(-len(samples) // MAX_SOLUTIONS)
        tried = samples[::step]
        unverified = []
        failures = []
        for verdict in self.verify_many(tried):
            if verdict.score is None:
                unverified.append(verdict.detail)
            elif not ALL_PASSED.fullmatch(verdict.detail):
                failures.append(verdict.detail)
        if unverified or failures:
            log.warning(
                "%s: of %d rows' own solutions that were tried, %d do not pass all tests and %d could not be "
                "verified (the first: %s); look at these tests, and at verifiers.code.max_execution_time",
                self.name, len(tried), len(failures), len(unverified), [*failures, *unverified][0],
            )  # fmt: skip

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
            results = self.client.test(program, tests, self.name == "code_stdio", limit)
        except CouldNotVerify as error:
            return Verdict(None, str(error))
        passed = results.passed
        rate = sum(passed) / max(len(passed), 1)
        score = rate if rate >= config.pass_rate_reward_threshold else 0.0
        if config.apply_perf_penalty and score > 0:  # runtimes are -1 where a test failed
            values = [max(limit - runtime, 0.0) / limit for runtime in results.seconds]
            score = sum(is_pass * value for is_pass, value in zip(passed, values, strict=True)) / len(passed)
        detail = f"{sum(passed)} of {len(passed)} tests passed"
        return Verdict(score, detail, num_judged_inside=results.num_inside)


def is_stdio_test(test: Any) -> bool:
    """Return whether a test has an input (a text, or lines) and an output, as the code server takes them."""
    if not isinstance(test, Mapping) or not isinstance(test.get("output"), str):
        return False
    stdin = test.get("input")
    return isinstance(stdin, str) or (isinstance(stdin, list) and all(isinstance(x, str) for x in stdin))


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
