"""Errors that one room raises and another one handles."""


class CouldNotVerify(Exception):
    """The error that an environment or a verifier has no verdict, for a reason that is not the policy's."""
