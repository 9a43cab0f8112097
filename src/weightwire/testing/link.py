"""A slow link on a fast machine: a TCP proxy on loopback that holds bytes back.

    with open_link("127.0.0.1", 8333, LinkShape(100e6, 0.08)) as link:
        open_store(url, options={**options, "endpoint": f"http://127.0.0.1:{link.port}"})

It needs no root. Each direction sends one byte after another at the link's rate, whatever the number
of connections, and every byte arrives half a round trip after it was sent. A new connection costs a
round trip before its first byte. Loss, reordering and congestion control are not modelled: a real
link of the same numbers is never faster, and often slower.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from weightwire.clock import Clock, SystemClock
from weightwire.errors import StopError

_READ_BYTES = 16 << 10
_START_S = 10.0
_RATES = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_DELAYS = {"ms": 1e-3, "s": 1.0}
_SHAPE = re.compile(r"([0-9]+(?:\.[0-9]+)?)([a-z]+)(?:,([0-9]+(?:\.[0-9]+)?)([a-z]+))?")


@dataclass(frozen=True)
class LinkShape:
    """How fast and how far."""

    bits_per_s: float
    round_trip_s: float = 0.0

    def seconds_for(self, n_bytes: float) -> float:
        """One request and its answer of so many bytes, at best."""
        return self.round_trip_s + n_bytes * 8 / self.bits_per_s

    def __str__(self) -> str:
        return f"{self.bits_per_s / 1e6:g} Mbit/s, {self.round_trip_s * 1e3:g} ms round trip"


def parse_shape(text: str) -> LinkShape:
    """``100mbit,80ms``: rate, and round trip if there is one.

    Raises:
        StopError: anything else.
    """
    found = _SHAPE.fullmatch(text.strip().lower().replace(" ", ""))
    rate = float(found[1]) * _RATES.get(found[2], 0.0) if found else 0.0
    is_known = found is not None and (found[4] is None or found[4] in _DELAYS)
    if found is None or not is_known or rate <= 0:
        raise StopError(f"{text!r:.60}: write a link as RATE,ROUND-TRIP, such as 100mbit,80ms")
    return LinkShape(rate, float(found[3] or 0) * _DELAYS.get(found[4] or "s", 1.0))


@dataclass
class Lane:
    """One direction: when bytes may leave, and when they arrive. Pure arithmetic on given times."""

    shape: LinkShape
    n_bytes: int = 0
    """All that was sent so far."""
    free_at: float = field(default=float("-inf"))
    """When the last byte so far has left."""

    def send(self, n_bytes: int, now: float) -> tuple[float, float]:
        """When these bytes have left, and when they arrive."""
        self.n_bytes += n_bytes
        self.free_at = max(self.free_at, now) + n_bytes * 8 / self.shape.bits_per_s
        return self.free_at, self.free_at + self.shape.round_trip_s / 2


@dataclass(frozen=True)
class Link:
    """A running link."""

    port: int
    """On 127.0.0.1."""
    up: Lane
    """From those who connect to the server behind it."""
    down: Lane


@contextmanager
def open_link(host: str, port: int, shape: LinkShape, clock: Clock | None = None) -> Iterator[Link]:
    """Run a link to a server, in a thread, on a free port of loopback.

    Raises:
        StopError: the link did not start.
    """
    proxy = _Proxy(host, port, shape, clock or SystemClock())
    thread = threading.Thread(target=proxy.run, name="link", daemon=True)
    thread.start()
    if not proxy.is_up.wait(_START_S) or proxy.link is None:
        raise StopError(f"the link to {host}:{port} did not start: {proxy.trouble}")
    try:
        yield proxy.link
    finally:
        proxy.stop()
        thread.join()


class _Proxy:
    """An event loop in a thread: accepts, connects, and passes bytes on when they are due."""

    def __init__(self, host: str, port: int, shape: LinkShape, clock: Clock) -> None:
        self._host, self._port, self._shape, self._clock = host, port, shape, clock
        self._up, self._down = Lane(shape), Lane(shape)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended: asyncio.Event | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.is_up = threading.Event()
        self.link: Link | None = None
        self.trouble = ""

    def run(self) -> None:
        """The thread's life."""
        try:
            asyncio.run(self._serve())
        except OSError as error:
            self.trouble = str(error)
        finally:
            self.is_up.set()

    def stop(self) -> None:
        """End it from another thread; connections are cut."""
        if self._loop is not None and self._ended is not None:
            with suppress(RuntimeError):  # the loop has ended by itself
                self._loop.call_soon_threadsafe(self._ended.set)

    async def _serve(self) -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.link = Link(server.sockets[0].getsockname()[1], self._up, self._down)
        self.is_up.set()
        await self._ended.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)  # connections are closed in the loop's next turn

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, both ways, until both sides have ended it, or one is gone."""
        task = asyncio.create_task(self._connect(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back: asyncio.StreamWriter | None = None
        try:
            await asyncio.sleep(self._shape.round_trip_s)
            there, back = await asyncio.open_connection(self._host, self._port)
            ways = ((reader, back, self._up), (there, writer, self._down))
            await asyncio.gather(*(self._pass_on(*way) for way in ways))
        except OSError:
            pass  # whoever is left hears it from the closing below
        finally:
            for each in (writer, back):
                if each is not None:
                    each.close()

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, lane: Lane
    ) -> None:
        """One way of one connection. Reading waits for the lane, delivering goes on beside it.

        Raises:
            OSError: one side is gone.
        """
        due: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        delivery = asyncio.create_task(self._deliver(due, writer))
        try:
            while data := await reader.read(_READ_BYTES):
                leaves, arrives = lane.send(len(data), self._clock.monotonic())
                due.put_nowait((arrives, data))
                await self._until(leaves)
            due.put_nowait((self._clock.monotonic() + self._shape.round_trip_s / 2, b""))
            await delivery
        finally:
            delivery.cancel()

    async def _deliver(
        self, due: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter
    ) -> None:
        """Hand over what is due; no bytes mean the end of this way, not of the other."""
        while True:
            arrives, data = await due.get()
            await self._until(arrives)
            if not data:
                writer.write_eof()
                return
            writer.write(data)
            await writer.drain()

    async def _until(self, moment: float) -> None:
        await asyncio.sleep(max(0.0, moment - self._clock.monotonic()))
