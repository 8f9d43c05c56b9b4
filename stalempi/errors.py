"""Defines the exception tree; the type of an error says whose fault it is.

    StalempiError
      ConfigError       the user's: a wrong value, found at construction (also a ValueError)
      ProtocolError     a peer's: a message that cannot be what it claims
      StallError        a peer's: nothing heard from it within the deadline
      NonFiniteError    the training's: a loss or gradient that is NaN or infinite

`assert` is kept for our own invariants.
"""

__all__ = ["ConfigError", "NonFiniteError", "ProtocolError", "StalempiError", "StallError"]


class StalempiError(Exception):
    """Root of every error that stalempi raises on purpose; its text is one line that says what to do."""


class ConfigError(StalempiError, ValueError):
    """The caller's value cannot be used."""


class ProtocolError(StalempiError):
    """A message from a peer does not fit the state that both sides agreed on."""


class StallError(StalempiError):
    """A peer has been silent for longer than the deadline."""


class NonFiniteError(StalempiError):
    """A loss or a gradient is NaN or infinite."""
