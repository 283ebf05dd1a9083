"""`python checks_on_node.py CASES`: several preflights in one process, for tests that run it on a node.

CASES is JSON: {name: {"overrides": [...], "variables": {name: value or null}, "quick": bool}}. For each one
line of JSON is printed: its name and the lines of its findings.
"""

import json
import os
import sys

import search_r1.llm_agent  # noqa: F401  (registers its environment)
from search_r1.search.probe import RetrievalProbe
from verl.preflight.preflight import run_preflight
from verl.preflight.target import Target
from verl.trainer.config import load_config


def main(cases: dict[str, dict]) -> None:
    for name, case in cases.items():
        for variable, value in case["variables"].items():
            os.environ.pop(variable, None)
            if value is not None:
                os.environ[variable] = value
        config = load_config(case["overrides"])
        preflight = run_preflight(Target(config, probe=RetrievalProbe(), is_thorough=not case["quick"]))
        print(json.dumps({"name": name, "findings": [f.line for f in preflight.findings]}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
