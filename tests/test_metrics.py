"""Events as JSON lines and as Prometheus metrics."""

from __future__ import annotations

import builtins
import json
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weightwire as ww
from weightwire.errors import ExtraMissing
from weightwire.events import Published, Updated
from weightwire.metrics import JsonLines, Prometheus, each
from weightwire.store.counting import CountingStore
from weightwire.store.open import open_store

PUBLISHED = Published(
    version=3,
    epoch=2,
    digest="ab" * 16,
    n_elements=1000,
    n_changed=10,
    n_bytes=70,
    n_state_bytes=2000,
    read_s=0.5,
    commit_s=0.25,
)
UPDATED = Updated(
    version=3,
    previous=2,
    digest="ab" * 16,
    n_bytes=70,
    n_changed=10,
    n_steps=1,
    lag=4,
    was_whole=True,
    n_detours=1,
    stage_s=0.2,
    fetch_s=0.1,
    activate_s=0.002,
    verify_s=0.05,
)


@pytest.fixture
def prometheus() -> Iterator[Prometheus]:
    made = Prometheus()
    yield made
    made.close()


def value(prometheus: Prometheus, name: str, **labels: str) -> float | None:
    """One sample."""
    return prometheus.registry.get_sample_value(f"weightwire_{name}", labels)


def test_every_event_is_a_line_with_its_type_its_time_and_all_fields(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "events.jsonl")
    sink(PUBLISHED)
    sink(UPDATED)
    first, second = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert (first["event"], second["event"]) == ("published", "updated")
    assert first["density"] == 0.01
    assert vars(PUBLISHED).items() <= first.items()
    assert vars(UPDATED).items() <= second.items()
    assert first["time"] <= second["time"]


def test_lines_are_added_to_those_of_earlier_processes(tmp_path: Path) -> None:
    for _ in range(2):
        JsonLines(tmp_path / "events.jsonl")(PUBLISHED)
    assert len((tmp_path / "events.jsonl").read_text().splitlines()) == 2


def test_lines_of_many_writers_do_not_mix(tmp_path: Path) -> None:
    def write() -> None:
        sink = JsonLines(tmp_path / "events.jsonl")
        for _ in range(50):
            sink(UPDATED)

    writers = [threading.Thread(target=write) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["version"] for line in lines] == [3] * 200


def test_a_file_that_cannot_be_written_costs_no_version(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"w": np.zeros(10, np.float32)}
    prometheus = Prometheus()
    sink = each(
        JsonLines(tmp_path), prometheus, lambda _: prometheus.write(tmp_path / "no" / "x.prom")
    )
    with ww.Publisher("memory://", state, on_published=sink) as publisher:
        assert publisher.publish().result().version == 0
    assert "not recorded" in caplog.text
    assert "not written" in caplog.text


def test_published_versions_are_counted(prometheus: Prometheus) -> None:
    prometheus(PUBLISHED)
    prometheus(PUBLISHED)
    assert value(prometheus, "published_version") == 3
    assert value(prometheus, "patch_bytes_total") == 140
    assert value(prometheus, "changed_ratio") == 0.01
    assert value(prometheus, "state_bytes") == 2000
    assert value(prometheus, "commit_seconds_sum") == 0.5


def test_what_was_not_sent_is_no_version(prometheus: Prometheus) -> None:
    prometheus(Published(-1, 1, "ab" * 16, 10, 1, 5, 20, 0.1))
    assert value(prometheus, "published_versions_total") == 0
    assert value(prometheus, "patch_bytes_total") == 0
    assert value(prometheus, "changed_ratio") == 0.1


def test_activated_versions_are_counted(prometheus: Prometheus) -> None:
    prometheus(UPDATED)
    assert value(prometheus, "active_version") == 3
    assert value(prometheus, "lag_versions") == 4
    assert value(prometheus, "fetched_bytes_total") == 70
    assert value(prometheus, "whole_loads_total") == 1
    assert value(prometheus, "activate_seconds_count") == 1
    assert value(prometheus, "activate_seconds_bucket", le="0.003") == 1
    assert value(prometheus, "activate_seconds_bucket", le="0.001") == 0


def test_a_receiver_says_nothing_of_versions_it_never_published(prometheus: Prometheus) -> None:
    prometheus(UPDATED)
    assert value(prometheus, "published_version") is None


def test_labels_are_on_every_metric() -> None:
    store = CountingStore(open_store("memory://"))
    prometheus = Prometheus(labels={"run": "7"}, store=store, n_heals=lambda: 2)
    prometheus(PUBLISHED)
    assert value(prometheus, "published_version", run="7") == 3
    assert value(prometheus, "heals_total", run="7") == 2
    assert value(prometheus, "store_requests_total", run="7", verb="read") == 0


def test_two_sinks_of_one_process_do_not_share_metrics(prometheus: Prometheus) -> None:
    other = Prometheus()
    other(PUBLISHED)
    assert value(prometheus, "published_version") is None


def test_requests_to_the_store_are_counted_by_verb() -> None:
    store = CountingStore(open_store("memory://"))
    state = {"w": np.zeros(1000, np.float32)}
    prometheus = Prometheus(store=store)
    with ww.Publisher(store, state, on_published=prometheus) as publisher:
        publisher.publish().result()
    assert value(prometheus, "store_requests_total", verb="create") == 2
    assert (value(prometheus, "store_bytes_total", direction="up") or 0) > 4000


def test_a_scrape_over_http_gives_the_metrics(prometheus: Prometheus) -> None:
    port = prometheus.serve(0)
    prometheus(UPDATED)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        assert "weightwire_active_version 3.0" in answer.read().decode()
    prometheus.close()
    prometheus.close()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics")


def test_the_text_file_is_replaced_whole(prometheus: Prometheus, tmp_path: Path) -> None:
    for _ in range(2):
        prometheus(UPDATED)
        prometheus.write(tmp_path / "ww.prom")
    assert "weightwire_updates_total 2.0" in (tmp_path / "ww.prom").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["ww.prom"]


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name.startswith("prometheus_client"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ExtraMissing, match=r"pip install 'weightwire\[metrics\]'"):
        Prometheus()
