"""Runs programs that nobody trusts against tests, behind Open-Instruct's HTTP API.

    supervisor (server: verdicts, clocks) -> judge (the test's text) <- plain data -> prisoner (the program)

`walls.py` says what a sandbox is made of, `zygote.py` starts them, `codec.py` is all that crosses between
judge and prisoner, `plain.py` says which programs may run several tests in one process. `client.py` is how
the rest of the framework asks.
"""
