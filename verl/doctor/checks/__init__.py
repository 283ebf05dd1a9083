"""The checks, by subject. Importing this fills the registry, in the order in which they run."""

from importlib import import_module

for subject in ("settings", "files", "disk", "machine", "retriever", "ray", "network", "gpu"):
    import_module(f"{__name__}.{subject}")
