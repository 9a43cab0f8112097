from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from weightwire.errors import StopError
from weightwire.testing.link import Lane, LinkShape, open_link, parse_shape

FAST = LinkShape(10e9, 0.0)


def test_a_shape_is_read_as_people_write_it() -> None:
    assert parse_shape("100mbit,80ms") == LinkShape(100e6, 0.08)
    assert parse_shape(" 1.5 Gbit, 0.2s ") == LinkShape(1.5e9, 0.2)
    assert parse_shape("56kbit") == LinkShape(56e3, 0.0)


@pytest.mark.parametrize(
    "text", ["", "fast", "100", "100mbit,", "100mbit,80", "100mb,80ms", "0mbit", "1mbit,3h"]
)
def test_another_shape_is_refused(text: str) -> None:
    with pytest.raises(StopError, match="100mbit,80ms"):
        parse_shape(text)


def test_bytes_leave_one_after_another_and_arrive_half_a_round_trip_later() -> None:
    lane = Lane(LinkShape(8000.0, 2.0))
    assert lane.send(1000, now=10.0) == (11.0, 12.0)
    assert lane.send(500, now=10.0) == (11.5, 12.5)
    assert lane.send(1000, now=20.0) == (21.0, 22.0)
    assert lane.n_bytes == 2500


def test_a_link_is_shared_by_all_its_connections() -> None:
    alone, shared = Lane(LinkShape(8e6)), Lane(LinkShape(8e6))
    for _ in range(10):
        last_alone, _ = alone.send(1000, now=0.0)
    for _ in range(20):
        last_shared, _ = shared.send(1000, now=0.0)
    assert last_shared == pytest.approx(2 * last_alone)


def test_whole_files_take_as_much_longer_as_they_are_larger() -> None:
    shape = LinkShape(100e6, 0.08)
    assert shape.seconds_for(0) == 0.08
    assert shape.seconds_for(2e6) - 0.08 == pytest.approx(2 * (shape.seconds_for(1e6) - 0.08))


@contextmanager
def echo_server() -> Iterator[int]:
    """Sends everything back, then hangs up when the other side does."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                threading.Thread(target=echo, args=(connection,), daemon=True).start()

        def echo(connection: socket.socket) -> None:
            with connection:
                while data := connection.recv(65536):
                    connection.sendall(data)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
    thread.join()


def exchange(port: int, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        threading.Thread(target=connection.sendall, args=(data,), daemon=True).start()
        found = b""
        while len(found) < len(data):
            found += connection.recv(65536)
        return found


def test_every_byte_arrives_in_order_on_every_connection() -> None:
    payloads = [bytes([number]) * 3 + bytes(range(256)) * 600 for number in range(6)]
    with echo_server() as port, open_link("127.0.0.1", port, FAST) as link:
        with ThreadPoolExecutor(6) as pool:
            assert list(pool.map(lambda data: exchange(link.port, data), payloads)) == payloads
        total = sum(len(each) for each in payloads)
        assert (link.up.n_bytes, link.down.n_bytes) == (total, total)


def test_a_slow_link_is_slower_than_a_fast_one() -> None:
    import time

    def seconds(shape: LinkShape) -> float:
        with open_link("127.0.0.1", port, shape) as link:
            began = time.monotonic()
            exchange(link.port, bytes(20_000))
            return time.monotonic() - began

    slow = LinkShape(400e3, 0.1)
    with echo_server() as port:
        # Bytes leave in both directions, and a connection costs a round trip: never faster.
        assert seconds(slow) >= slow.round_trip_s + slow.seconds_for(20_000) * 0.99


def test_a_server_that_hangs_up_is_heard() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with (
            open_link("127.0.0.1", port, FAST) as link,
            socket.create_connection(("127.0.0.1", link.port), timeout=60) as connection,
        ):
            behind, _ = server.accept()
            behind.sendall(b"bye")
            behind.close()
            assert connection.recv(10) == b"bye"
            assert connection.recv(10) == b""


def test_nobody_behind_the_link_means_the_connection_ends() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with (
        open_link("127.0.0.1", port, FAST) as link,
        socket.create_connection(("127.0.0.1", link.port), timeout=60) as connection,
    ):
        assert connection.recv(10) == b""
