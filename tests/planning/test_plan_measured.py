"""The memory plan against real processes with a model of 100M parameters, loading included."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from bench_memory import Work, measure_phases, plan_phases, write_model


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(300)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(("num_processes", "estimator"), [(1, "gae"), (2, "grpo")])
def test_the_plan_is_what_processes_take_in_each_phase(num_processes, estimator, tmp_path_factory):
    folder = write_model("100m", tmp_path_factory.getbasetemp() / "100m")
    work = Work(rows=4, prompt=16, longest=128, in_a_pass=256)
    settings = work.settings(folder, num_processes, [f"algorithm.adv_estimator={estimator}"])
    plan = plan_phases(settings)
    taken = measure_phases(work, settings, num_processes)
    assert list(plan) == [phase for phase in taken if phase]
    assert plan == {phase: pytest.approx(taken[phase][0], rel=0.05) for phase in plan}
