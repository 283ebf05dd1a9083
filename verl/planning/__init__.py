"""What follows from a configuration before anything starts.

    config_validation.py    what can't work
    passes.py               the passes of a step
    placement.py            who goes where
    hardware.py             how much memory there is
    model_memory.py, cpu_memory.py -> memory_plan.py    how full each device gets

The trainer acts by it, and the preflight and the dry run report it.
"""
