"""The plan of a run, derived from its configuration before anything starts.

    config_validation.py    settings that can't work
    passes.py               the passes of a step
    placement.py            the processes of each role, and their devices
    hardware.py             the memory that each device has
    model_memory.py -> memory_plan.py    the memory that each GPU needs

The trainer acts on the plan, and the preflight and the dry run report it.
"""
