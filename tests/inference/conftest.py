import pytest
from served import serving


@pytest.fixture(scope="session")
def server():
    """Without a token."""
    with serving() as running:
        yield running
