"""The doctor: finds what would spoil a run before anything is spent on it.

    command.py, start.py -> collect.py -> facts_*.py look -> Facts (facts.py)
                         -> registry.py -> checks/*.py judge -> findings (findings.py) -> lines or JSON

What is seen is kept apart from what is thought of it, so that facts recorded on another machine can be judged
(`--save_facts`, `--facts`), and so that a check is a pure function. A new check is a function in checks/ with
a name, what it needs before it can look (needs.py), and a first docstring line that says what it finds. verl
never imports search_r1 but for its programs; of the doctor, which is one, only facts_retriever.py does.
"""
