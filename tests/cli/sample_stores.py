"""Small runs in a folder, published through the command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sample_runs import Arrays, model, run, save, stepped

import weightwire as ww


@dataclass(frozen=True)
class Chain:
    """A run in a folder, and the checkpoint that each of its versions was made from."""

    store: Path
    checkpoints: list[Path]

    def publish_next(self, *options: object) -> dict[str, object]:
        """One more version; gives what the command printed."""
        number = len(self.checkpoints)
        path = save(self.store.parent / f"step-{number}", "sharded", version(number))
        self.checkpoints.append(path)
        outcome = run("publish", self.store, path, "--json", *options)
        assert outcome.code == 0, outcome.stderr
        return outcome.json

    def publish_beside(self) -> None:
        """One more version, from a thread beside a command: two commands would share a stdout."""
        number = len(self.checkpoints)
        self.checkpoints.append(
            save(self.store.parent / f"step-{number}", "sharded", version(number))
        )
        with ww.Publisher(self.store, version(number), claim="with the first version") as publisher:
            publisher.publish().result()

    def objects(self) -> dict[str, bytes]:
        """Everything in the store."""
        return {
            str(path.relative_to(self.store)): path.read_bytes()
            for path in self.store.rglob("*")
            if path.is_file()
        }

    def one(self, pattern: str) -> Path:
        """The first object of this name."""
        return min(self.store.glob(pattern))


def version(number: int) -> Arrays:
    """The model after so many steps."""
    arrays = model()
    for step in range(number):
        arrays = stepped(arrays, step)
    return arrays


def make_chain(root: Path, n_versions: int, *options: object) -> Chain:
    """So many versions."""
    chain = Chain(root / "run", [])
    for _ in range(n_versions):
        chain.publish_next(*options)
    return chain


def flip(path: Path, offset: int = -8) -> None:
    """Change one bit."""
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1
    path.write_bytes(raw)
