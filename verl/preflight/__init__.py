"""The preflight: what would spoil a run, and whether it fits into memory, before anything is spent.

    target.py               what is looked at, and Finding: one trouble in one line
    machine_checks.py, run_checks.py, cluster.py    the checks: functions from the Target to findings
    memory.py -> plan.py    who goes where, memory of each device
    preflight.py            the checks put to work: by the command, and by each run at its start

Everything asks the objects that the run itself uses: the configuration, Passes, roles_of, the model's config.
A new check is a function whose docstring's first line says what it finds, with a name in its file's table.
"""
