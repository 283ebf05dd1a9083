"""The code server, which runs untrusted programs against tests behind Open-Instruct's HTTP API.

    supervisor (server: verdicts, clocks) -> judge (the test's text) <- plain data -> prisoner (the program)

A test that needs more than plain data runs with the program, in the prisoner (`inside.py`), and its verdict
says so. `rewriting.py` prepares the text of a test for both. `walls.py` says what a sandbox is made of, and
`zygote.py` starts sandboxes. `wire.py` defines all that crosses between judge and prisoner. `plain.py`
decides which programs may run several tests in one process.
The rest of the framework uses `client.py`.
"""
