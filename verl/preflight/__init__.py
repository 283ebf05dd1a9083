"""The preflight: what would spoil a run, and whether it fits into memory, before anything is spent.

    findings.py                          Finding: one trouble in one line; the table of checks
    target.py, cluster.py, machine.py    what is looked at: the run, the Ray cluster, one machine
    run_checks, machine_checks, ray_checks    the checks
    shapes, engine_memory, rollout_memory -> plan.py -> report.py    who goes where, memory of each device
    preflight.py                         the checks put to work: by the command, and by each run at its start

Everything asks the objects that the run itself uses: the configuration, Passes, pools_of, the model's config.
A new check is a generator of findings with a name and a docstring whose first line says what it finds.
"""
