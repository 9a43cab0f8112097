from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from demo.sample_records import activated, record_of, sample_events, sample_settings, spoiled
from weightwire.demo.charts import Axis, Chart, Series, heat_map
from weightwire.demo.proofs import judge
from weightwire.demo.report import page, plots, write_report
from weightwire.demo.run import Outcome
from weightwire.demo.settings import Settings
from weightwire.demo.summary import summary_of, summary_text
from weightwire.demo.table import footer, row_of, titles_of
from weightwire.testing.link import LinkShape

LINK = LinkShape(8e6, 0.1)


class Reading(HTMLParser):
    """Which plots a page has, and whether its tags are closed."""

    def __init__(self) -> None:
        super().__init__()
        self.labels: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "svg":
            self.labels.append(dict(attrs)["aria-label"] or "")
        if tag not in {"meta"}:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Closed already."""

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def outcome_of(settings: Settings, *, is_spoiled: bool = False) -> Outcome:
    events = sample_events(settings)
    if is_spoiled:
        events = spoiled(events, activated("patches", 1, 3), live_digest="other")
    record = record_of(events)
    return Outcome(record, judge(record, settings), 12.0)


def page_of(*, is_spoiled: bool = False) -> str:
    settings = sample_settings()
    outcome = outcome_of(settings, is_spoiled=is_spoiled)
    return page(outcome, settings, summary_of(outcome, settings, LINK), LINK)


def test_the_report_has_every_plot() -> None:
    reading = Reading()
    reading.feed(page_of())
    assert reading.open == []
    wanted = ("Reward", "Loss", "Changed weights", "Bytes", "Times", "Changed share", "To a worker")
    assert [label.startswith(start) for label, start in zip(reading.labels, wanted, strict=True)]


def test_the_report_needs_nothing_from_elsewhere() -> None:
    assert not re.search(r"https?:|\bsrc=|\bhref=|url\(|@import|<script", page_of())


def test_the_report_says_which_claim_does_not_hold() -> None:
    assert 'class="no"' not in page_of()
    spoiled_page = page_of(is_spoiled=True)
    assert "A claim does not hold" in spoiled_page
    assert "worker 1, version 3" in spoiled_page


def test_the_report_is_written_where_it_was_asked_for(tmp_path: Path) -> None:
    settings = sample_settings()
    outcome = outcome_of(settings)
    summary = summary_of(outcome, settings, None)
    path = write_report(tmp_path / "new" / "report.html", outcome, settings, summary, None)
    assert path.read_text().startswith("<!doctype html>")


def test_both_runs_are_drawn_and_are_one_line_where_they_agree() -> None:
    reward = plots(outcome_of(sample_settings()).record, sample_settings(), None)["reward"]
    first, second = re.findall(r'points="([^"]+)"', reward)
    assert first == second
    assert len(first.split()) == 4


def test_a_plot_of_nothing_is_still_a_plot() -> None:
    for is_log in (False, True):
        assert Chart("empty", [Series("none", "first", [])], is_log=is_log).svg().endswith("</svg>")
    assert heat_map("empty", [], []).endswith("</svg>")


@pytest.mark.parametrize("is_log", [False, True])
def test_every_point_lies_inside_its_plot(is_log: bool) -> None:
    points = [(step, 10.0 ** (step - 5)) for step in range(1, 9)]
    drawn = Chart("wide", [Series("one", "first", points)], is_log=is_log).svg()
    places = re.search(r'points="([^"]+)"', drawn)
    assert places is not None
    for place in places[1].split():
        x, y = map(float, place.split(","))
        assert 0 < x < 640
        assert 0 < y < 280


def test_ticks_are_round_and_within_the_axis() -> None:
    assert Axis(0.0, 0.47).ticks() == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])
    assert Axis(1.0, 1000.0, is_log=True).ticks() == [1.0, 10.0, 100.0, 1000.0]


def test_a_row_has_a_cell_for_every_title_even_before_anything_is_known() -> None:
    settings = sample_settings()
    full = row_of(outcome_of(settings).record, settings, "patches", 4)
    assert dict(zip(titles_of(settings), full, strict=True))["of full"] == "1/50"
    empty = row_of(record_of([]), settings, "patches", 4)
    assert len(empty) == len(titles_of(settings))


def test_the_summary_sets_what_patches_took_against_what_whole_files_would_take() -> None:
    settings = sample_settings()
    outcome = outcome_of(settings)
    summary = summary_of(outcome, settings, LINK)
    assert summary["link_full_s"] == pytest.approx(0.1 + 2000 * 8 / 8e6)
    text = summary_text(summary, outcome)
    assert "50 × smaller" in text
    assert "20.0 ms to stage a version, 20.0 ms as a whole file (both measured)" in text
    alone = summary_text({**summary, "full_stage_s": 0.0}, outcome)
    assert "(measured), 102.0 ms as a whole file at best (computed)" in alone
    assert "102 ms at best (computed)" in footer(outcome.record, "patches", LINK)
