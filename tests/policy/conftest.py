"""Gives every test of a policy a referee that checks each event, and the end of the run at teardown."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .watched import Watch


@pytest.fixture
def watch() -> Iterator[Watch]:
    """Makes watched policies; at the end all workers leave, and every push must have been applied exactly once."""
    maker = Watch()
    yield maker
    for watched in maker.made:
        watched.finish()
