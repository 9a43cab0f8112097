"""One version at a time: what publishers of one process and of many ranks have in common.

When ``publish`` returns, who waits for whom, what a failure belongs to, and how it all ends.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Literal

from weightwire.clock import Clock
from weightwire.diff.places import Outline
from weightwire.diff.redo import RedoLog
from weightwire.errors import FencedWriter, PublisherClosed, RetryError
from weightwire.events import Published
from weightwire.kernels.devices import typed_memory_errors
from weightwire.store.records import Commit
from weightwire.store.resume import Head
from weightwire.workers import failed, flatten, forget_frames, forget_frames_of

log = logging.getLogger("weightwire.publisher")

Mode = Literal["sync", "observe", "validate"]
Event = Callable[[Published], None]
Background = Callable[[int, str], Executor]


@dataclass
class Pending:
    """A version that was read, and is not known to be committed."""

    record: Commit
    redo: RedoLog
    outline: Outline
    published: Published


class Turns(ABC):
    """The part of a publisher that is about time: reading now, sending behind, one at a time."""

    def __init__(self, *, overlap: bool, clock: Clock, background: Background) -> None:
        self._overlap, self._clock = overlap, clock
        self._uploads = background(4, "upload")
        self._commits = background(1, "commit")
        self._reads = background(1, "read")
        self._extras_worker = background(1, "extras")
        self._head = Head()
        self._pending: Pending | None = None
        self._fenced: FencedWriter | None = None
        self._step: int | None = None
        self._is_closed = False
        self._last: Future[Published] | None = None
        self._reading: Future[Future[Published]] | None = None

    @property
    def version(self) -> int:
        """The newest version this publisher knows to be committed; -1 before the first."""
        return self._head.version

    @property
    def epoch(self) -> int:
        """This publisher's epoch; every later one has a higher."""
        return self._head.epoch

    @property
    def is_fenced(self) -> bool:
        """Whether another publisher took over."""
        return self._fenced is not None

    def wait_until_read(self) -> None:
        """Wait until the state may change again; only ``overlap`` makes this necessary."""
        if self._reading is not None:
            self._reading.exception()

    def wait(self) -> None:
        """Wait for the version under way and for anchors and skip patches in the making.

        Raises:
            WeightwireError: what the last publish failed with.
        """
        if self._last is not None:
            self._last.result()
        self._wait_for_extras()

    def close(self) -> None:
        """Finish what is under way, then let go of threads and memory."""
        self._is_closed = True
        try:
            self._wait_for_last()
            self._settle()
        except Exception as error:  # whatever it is, nothing comes after this that could mend it
            log.error("nobody answers for the last version; it may or may not exist: %s", error)
        finally:
            self._let_go()

    def _publish(self, step: int | None, *, wait: bool = True) -> Future[Published]:
        """Begin the next version, once the one under way is through.

        Raises:
            FencedWriter, PublisherClosed, StopError: there will be no next version.
        """
        if self._is_closed:
            raise PublisherClosed("this publisher was closed; make a new one")
        if not wait and self._last is not None and not self._last.done():
            return self._last
        self._wait_for_last()
        if self._fenced is not None:
            raise self._fenced
        self._step = step
        self._prepare()
        self._last = self._begin()
        # It is kept until the next one: its error must not keep the GPU memory of what failed.
        self._last.add_done_callback(forget_frames_of)
        return self._last

    def _begin(self) -> Future[Published]:
        if not self._overlap:
            return self._try_to_read()
        self._reading = self._reads.submit(self._try_to_read)
        return flatten(self._reading)

    @abstractmethod
    def _prepare(self) -> None:
        """What must happen in the caller's thread, before anything is read."""

    @abstractmethod
    def _read(self) -> Future[Published]:
        """Everything that looks at the live state; the rest happens behind the caller's back."""

    @abstractmethod
    def _settle(self) -> None:
        """Find out what became of a commit that nobody answered."""

    @abstractmethod
    def _wait_for_extras(self) -> None:
        """Wait for what is made off the training path."""

    @abstractmethod
    def _close_extras(self) -> None:
        """The same, for the last time."""

    def _try_to_read(self) -> Future[Published]:
        """What may be tried again belongs to the future; a trainer need not stop for it."""
        try:
            with typed_memory_errors():
                return self._read()
        except FencedWriter as error:
            forget_frames(error)  # kept, and raised again by every later publish
            raise
        except RetryError as error:
            log.warning("nothing was published: %s", error)
            return failed(error)

    def _wait_for_last(self) -> None:
        if self._last is not None:
            self._last.exception()

    def _let_go(self) -> None:
        try:
            self._close_extras()
        finally:
            for executor in (self._reads, self._commits, self._uploads, self._extras_worker):
                executor.shutdown(wait=True)
        if self._pending is not None:
            self._pending.redo.close()
            self._pending = None


def next_record(run: str, head: Head, published: Published, put_id: str, clock: Clock) -> Commit:
    """The commit that follows ``head``, still without a patch or an anchor."""
    return Commit(
        run=run,
        version=published.version,
        epoch=published.epoch,
        put_id=put_id,
        previous=head.record_sha256,
        time_ms=int(clock.now() * 1000),
        digest=published.digest,
        n_elements=published.n_elements,
        n_state_bytes=published.n_state_bytes,
        patch=None,
        anchor=None,
        step=published.step,
    )
