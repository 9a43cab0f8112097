"""An anchor of a state on many ranks: rank 0 writes it as a stream, the others give their pieces."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from weightwire.diff.state import StateReader
from weightwire.errors import StateMoved
from weightwire.store.anchor import write_anchor
from weightwire.store.contract import ObjectStore
from weightwire.store.records import AnchorRef
from weightwire.trainers.ranks import Ranks
from weightwire.trainers.shards import Ownership
from weightwire.trainers.spread_state import SpreadState, serve


@dataclass(frozen=True)
class SpreadAnchor:
    """One anchor in the making, as one rank sees it."""

    ranks: Ranks
    local: StateReader
    """This rank's elements, standing still."""
    starts: Mapping[str, int]
    ownership: Ownership | None
    """Who has what; only rank 0 knows."""

    def stream(
        self, store: ObjectStore, folder: str, digest: str, companions: Path | None
    ) -> AnchorRef | None:
        """Upload it on rank 0, help elsewhere; called on every rank. Only rank 0 gets the reference.

        Raises:
            StateMoved: what was uploaded does not have this digest.
            RankFailed, RankLost, StoreUnavailable, StoreRefused: it could not be put together or sent.
        """
        if self.ownership is None:
            serve(self.ranks, self.local, self.starts)
            return None
        state = SpreadState(self.ranks, self.ownership, self.local, self.starts)
        with closing(state):
            ref = write_anchor(store, folder, state, digest, companions)
        if state.digest != digest:
            # Old versions are collected because this one is there: it must be what it says.
            raise StateMoved(f"the baselines do not have digest {digest} any more: no anchor of it")
        return ref
