"""Starts what tests of several ranks need beside the first tests, which take as long."""

import pytest

import ranks


@pytest.fixture(scope="session", autouse=True)
def _server() -> None:
    ranks.start_server()
