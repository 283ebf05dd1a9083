"""`python doctor_on_node.py CASES`: several diagnoses in one process, for tests that run it on a node.

CASES is JSON: {name: {"overrides": [...], "variables": {name: value or null}, "quick": bool}}. For each one
line of JSON is printed: its name, the lines of its findings, and how far the clocks of the nodes are off.
"""

import json
import os
import sys

from verl.doctor.collect import collect
from verl.doctor.facts_run import load_run
from verl.doctor.registry import diagnose


def main(cases: dict[str, dict]) -> None:
    for name, case in cases.items():
        for variable, value in case["variables"].items():
            os.environ.pop(variable, None)
            if value is not None:
                os.environ[variable] = value
        facts = collect(load_run(case["overrides"], "ppo_trainer"), quick=case["quick"])
        findings = [finding.line for finding in diagnose(facts)]
        clocks = {machine.name: machine.clock_offset_s for machine in facts.nodes}
        print(json.dumps({"name": name, "findings": findings, "clocks": clocks}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
