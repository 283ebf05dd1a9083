"""A user's module that fails as it is imported."""

value = undefined  # noqa: F821
