import verl  # noqa: F401  (it says which Python has a missing package)
