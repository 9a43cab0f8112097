"""Run every attack with every backend: ``python attacks/run.py [words of an attack's name]``.

An attack must be refused with a typed error before anything is written. Exit status 1 if one is not.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import bucket_lies  # noqa: F401
import damage  # noqa: F401
import folder_tricks  # noqa: F401
import index_lies  # noqa: F401
import plain_lies  # noqa: F401
import record_lies  # noqa: F401
import stream_lies  # noqa: F401
import weightwire as ww
from judge import HARMLESS, REFUSED, bounded, judge_files, judge_folder
from registry import ATTACKS, TRICKS, Attack, FolderTrick
from sample import Files, true_files

BATCH = 100
"""Cases that share one watchdog and one memory bound."""


def run_attack(attack: Attack, codec: str, backend: str, n_most: int | None = None) -> Counter[str]:
    """Outcomes of an attack's cases, or of ``n_most`` of them, evenly spread."""
    cases = list(attack.make(codec))
    step = max(1, -(-len(cases) // n_most)) if n_most else 1
    cases = cases[::step]
    outcomes: Counter[str] = Counter()
    ww.use_backend(backend)
    try:
        for start in range(0, len(cases), BATCH):
            with bounded():
                outcomes.update(judge_files(files) for files in cases[start : start + BATCH])
    finally:
        ww.use_backend(None)
    return outcomes


def run_trick(trick: FolderTrick) -> Counter[str]:
    """The outcome of one trick with a folder on disk."""
    with tempfile.TemporaryDirectory() as root, bounded():
        folder = Path(root) / "patch"
        save(true_files("compact"), folder)
        trick.play(folder)
        return Counter([judge_folder(folder)])


def save(files: Files, folder: Path) -> None:
    """Write files as they are, lies and all."""
    folder.mkdir()
    (folder / "patch.json").write_bytes(files.index)
    for name, raw in files.buckets.items():
        (folder / name).write_bytes(raw)


def broken_promises(outcomes: Counter[str], *, may_pass: bool) -> list[str]:
    """The outcomes that must not be."""
    allowed = {REFUSED, HARMLESS} if may_pass else {REFUSED}
    return [outcome for outcome in outcomes if outcome not in allowed]


def main(wanted: str) -> int:
    """Print a table of all attacks; give the exit status."""
    n_cases = n_broken = 0
    for title, outcomes, may_pass in _all_outcomes(wanted):
        broken = broken_promises(outcomes, may_pass=may_pass)
        n_cases += outcomes.total()
        n_broken += sum(outcomes[outcome] for outcome in broken)
        print(f"{title:88} {outcomes.total():6} cases {outcomes[REFUSED]:6} refused", end="")
        print(f" {outcomes[HARMLESS]:4} no effect" if outcomes[HARMLESS] else "", flush=True)
        for outcome in broken:
            print(f"    BROKEN PROMISE, {outcomes[outcome]} times: {outcome[:300]}")
    print(f"{n_cases} cases, {n_broken} broken promises")
    return 1 if n_broken or not n_cases else 0


def _all_outcomes(wanted: str) -> Iterator[tuple[str, Counter[str], bool]]:
    for attack in ATTACKS:
        for codec in attack.codecs:
            for backend in ww.available_backends():
                if wanted in attack.name:
                    title = f"{attack.name} ({codec}, {backend})"
                    n_most = 1000 if backend == "reference" else None  # its loops are slow
                    yield title, run_attack(attack, codec, backend, n_most), attack.may_pass
    for trick in TRICKS:
        if wanted in trick.name:
            yield trick.name, run_trick(trick), False


if __name__ == "__main__":
    sys.exit(main(" ".join(sys.argv[1:])))
