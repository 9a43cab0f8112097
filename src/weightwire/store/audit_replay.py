"""Every version of a run, rebuilt from the oldest anchor on and proven by its digest.

Memory and disk are bounded by the state, not by the number of versions: patches are staged over a
copy of the state in a temporary file, which is rewritten when enough of them have gathered.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from pathlib import Path

from weightwire.apply.staging import Staging
from weightwire.checkpoint import Checkpoint
from weightwire.diff.baseline import Baseline
from weightwire.diff.spill import SPILL_BYTES
from weightwire.diff.state import StateReader, StateView
from weightwire.digest import TensorDigest, digest_state
from weightwire.errors import (
    BaseMismatch,
    DiskTrouble,
    StoreRefused,
    StoreUnavailable,
    TargetMismatch,
    WeightwireError,
)
from weightwire.store.cache import Cache
from weightwire.store.fetch import Fetcher
from weightwire.store.history import History
from weightwire.store.plan import Step
from weightwire.store.run import Run
from weightwire.store.survey import Damage, damage_of

_CHANGE_BYTES = 8
"""Room that a staged change takes, about."""


class Replay:
    """Walks a run from version to version; a context manager."""

    def __init__(self, run: Run, progress: Callable[[int], None]) -> None:
        """Make room on disk, where ``TMPDIR`` says, for an anchor and a copy of the state."""
        self._stack = ExitStack()
        self._folder = Path(
            self._stack.enter_context(tempfile.TemporaryDirectory(prefix="weightwire-audit-"))
        )
        self._cache = self._stack.enter_context(closing(Cache()))
        self._fetcher = Fetcher(run.store, self._cache, run.executor)
        self._progress = progress
        self._base = Baseline(self._folder / "state")
        self._staging: Staging | None = None
        self._at: tuple[int, str] | None = None
        self.n_rebuilt = 0

    def __enter__(self) -> Replay:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def walk(self, history: History, gone: frozenset[str]) -> list[Damage]:
        """Every version in turn; what is wrong is collected, and the next anchor is a new start.

        Raises:
            StoreUnavailable, StoreRefused, DiskTrouble: nobody can tell then.
        """
        damages: list[Damage] = []
        for version, commit in history.commits.items():
            if commit.patch and self._at and self._at[0] == commit.patch.base_version:
                step = Step(version, commit.digest, patch=commit.patch)
                damages += self._guarded(self._take_patch, step)
            elif commit.is_empty and self._at == (version - 1, commit.digest):
                self._at = (version, commit.digest)
            for anchor in _anchors(history, version, gone):
                damages += self._guarded(self._take_anchor, anchor)
            if self._at == (version, commit.digest):
                self.n_rebuilt += 1
            else:
                self._at = None
        return damages

    def _guarded(self, take: Callable[[Step], None], step: Step) -> list[Damage]:
        try:
            take(step)
        except (StoreUnavailable, StoreRefused, DiskTrouble):
            raise
        except WeightwireError as error:
            return [damage_of(error, step.folder, step.version)]
        finally:
            self._progress(step.n_bytes)
        return []

    def _take_patch(self, step: Step) -> None:
        """Staging proves every piece before and after it is changed, and the sum of all."""
        at, self._at = self._at, None
        staging, patch = self._staging, step.patch
        if staging is None or patch is None or at != (patch.base_version, patch.base_digest):
            raise BaseMismatch(f"{step.folder}: does not start from the bits of the version before")
        staging.take(self._fetcher.patch(step))
        self._at = (step.version, step.digest)
        if staging.n_changed * _CHANGE_BYTES > SPILL_BYTES:
            self._begin(staging, staging.digests)

    def _take_anchor(self, step: Step) -> None:
        """Prove an anchor by itself; go on from it where the chain before it is broken."""
        folder, manifest = self._fetcher.anchor(step)
        try:
            with Checkpoint.open(folder) as checkpoint:
                state = StateView(checkpoint, checkpoint.specs, manifest.ties)
                digest, digests = digest_state(state)
                if digest != step.digest:
                    raise TargetMismatch(f"{step.folder}: its bits have digest {digest}")
                if self._at is None:
                    self._begin(state, digests)
                    self._at = (step.version, step.digest)
        finally:
            self._cache.discard(step.folder)

    def _begin(self, state: StateReader, digests: Mapping[str, TensorDigest]) -> None:
        self._base.fill(state)
        self._staging = Staging(self._base, digests)


def _anchors(history: History, version: int, gone: frozenset[str]) -> list[Step]:
    commit = history.commits[version]
    refs = [commit.anchor, *(o.anchor for o in history.offers.values() if o.version == version)]
    return [
        Step(version, commit.digest, anchor=ref) for ref in refs if ref and ref.folder not in gone
    ]
