"""Says how often something is due, in global samples or in seconds."""

from __future__ import annotations

from dataclasses import dataclass

from stalempi.errors import ConfigError

__all__ = ["Every"]


@dataclass(frozen=True)
class Every:
    """How often something is due: every so many global `samples`, or `seconds`; neither is never."""

    samples: int | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, text: str | int | None, what: str) -> Every:
        """Reads a number of samples, or of seconds as in "30s"; ConfigError, about `what`, otherwise."""
        if text is None:
            return cls()
        words = str(text).strip()
        try:
            found = cls(seconds=float(words[:-1])) if words.endswith("s") else cls(samples=int(words))
            if 0 < (found.samples or found.seconds or 0) < float("inf"):
                return found
        except ValueError:
            pass
        raise ConfigError(f"{what} every {text!r}: give global samples as in 5000, or seconds as in 30s")

    def __str__(self) -> str:
        return f"{self.seconds:g}s" if self.seconds else str(self.samples) if self.samples else "never"
