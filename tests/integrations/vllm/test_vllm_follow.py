"""The sidecar, the example of the page, and the plug-in in a vLLM that has nothing for it."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest
from typer.testing import CliRunner
from vllm_runs import PROMPTS, World
from vllm_servers import environment

from weightwire.cli import app
from weightwire.engines.vllm import VllmServer, follow, register
from weightwire.errors import EngineRefused, EngineUnavailable, NotARun

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples" / "integrations"


def test_a_sidecar_brings_a_server_to_every_version_while_another_does_not_answer(
    one_rank: World,
) -> None:
    store, run = one_rank.new_run()
    run.publish()
    nobody = VllmServer("http://127.0.0.1:9", timeout_s=1)
    stop, seen, failed = threading.Event(), [], []
    for step in follow(store, [one_rank.client, nobody], poll_s=0.05, stop=stop):
        seen += [step.version] if step.pauses else []
        failed += [*step.failures.values()]
        if seen[-1] == one_rank.trained.fresh:
            stop.set()
        elif step.pauses:
            run.publish()
    run.close()
    assert seen == [*range(one_rank.trained.fresh + 1)]
    assert {type(each) for each in failed} == {EngineUnavailable}
    assert one_rank.server.checksums() == one_rank.fresh_checksums


def test_a_sidecar_that_starts_late_connects_and_catches_up(two_ranks: World) -> None:
    store, run = two_ranks.new_run()
    for _ in range(two_ranks.trained.fresh + 1):
        last = run.publish()
    run.close()
    command = ["sidecar", str(store), two_ranks.server.url, "--until", str(last.version), "--json"]
    said = CliRunner().invoke(app, command)
    assert said.exit_code == 0, said.output
    [line] = said.stdout.splitlines()
    assert (json.loads(line)["version"], json.loads(line)["n_ranks"]) == (last.version, 2)
    assert two_ranks.server.checksums() == two_ranks.fresh_checksums
    assert two_ranks.client.prove(last.version, last.digest) == len(two_ranks.trained.versions[0])


def test_a_sidecar_of_a_run_that_is_none_says_so(one_rank: World) -> None:
    with pytest.raises(NotARun):
        next(iter(follow(one_rank.folder / "no run", one_rank.client)))


def test_the_example_of_the_page_runs(
    one_rank: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(one_rank.trained.checkpoint), one_rank.server.url]
    store = str(one_rank.folder / "example")
    monkeypatch.setattr(sys, "argv", ["vllm_follow.py", *arguments, store])
    runpy.run_path(str(EXAMPLES / "vllm_follow.py"), run_name="__main__")
    said = capsys.readouterr().out
    print(said)
    assert "version 5: " in said
    assert f"{len(one_rank.trained.versions[0])} tensors proven" in said


@pytest.mark.long
def test_an_engine_in_this_process_follows_too(one_rank: World) -> None:
    store, run = one_rank.new_run()
    for _ in range(one_rank.trained.fresh + 1):
        last = run.publish()
    run.close()
    actor = Path(__file__).parent / "vllm_offline_actor.py"
    arguments = [str(one_rank.trained.checkpoint), store, str(last.version), json.dumps(PROMPTS)]
    done = subprocess.run(
        [sys.executable, str(actor), *arguments],
        env=environment(n_ranks=1),
        capture_output=True,
        check=False,
        text=True,
        timeout=400,
    )
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert results, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(results[0].removeprefix("RESULT"))
    assert found["checksums"] == one_rank.fresh_checksums
    assert found["tokens"] == one_rank.fresh_tokens
    assert found["version"] == str(last.version)


def test_a_url_that_is_none_is_refused() -> None:
    with pytest.raises(EngineRefused, match="give http://host:port"):
        VllmServer("ftp://somewhere")


def test_registering_in_a_vllm_without_weight_transfer_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
    register()
    register()
