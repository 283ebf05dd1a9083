"""The preflight, which finds what would spoil a run before anything is spent.

It also tells whether the run fits into memory (`verl/planning`).

    target.py               what the checks look at, and Finding: one trouble in one line
    machine_checks.py, run_checks.py, cluster.py    the checks: functions from the Target to findings
    preflight.py            runs the checks, for the command and at the start of each run

Everything asks the objects that the run itself uses: the configuration, Passes, roles_of, and the model's
config. A new check is a function with a name in its file's table. The first line of its docstring says what
it finds.
"""
