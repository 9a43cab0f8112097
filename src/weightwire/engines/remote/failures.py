"""What went wrong in a rank, as a value that can travel to other processes."""

from __future__ import annotations

from dataclasses import dataclass

from weightwire import errors
from weightwire.errors import StopError, WeightwireError


@dataclass(frozen=True)
class Failure:
    """What went wrong on one rank, for the way to other processes."""

    kind: str
    """The class of the error."""
    message: str

    def as_error(self) -> WeightwireError:
        """The error it was; a class that is not ours becomes a ``StopError``."""
        found = getattr(errors, self.kind, None)
        if isinstance(found, type) and issubclass(found, WeightwireError):
            return found(self.message)
        return StopError(f"{self.kind}: {self.message}")


def failure_of(error: BaseException) -> Failure:
    """An error as a value, under the closest of its classes that every process knows."""
    for kind in type(error).__mro__:
        if getattr(errors, kind.__name__, None) is kind:
            return Failure(kind.__name__, str(error))
    return Failure(type(error).__name__, repr(error))
