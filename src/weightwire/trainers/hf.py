"""Hugging Face ``Trainer`` and every trainer built on it, TRL's ``GRPOTrainer`` among them: one callback.

    trainer.add_callback(WeightwireCallback("s3://bucket/run-7"))

It publishes when training begins, after every so many optimizer steps, and what is left when training
ends. A store that is away does not stop training: the next publish covers everything. The main process
publishes; of a model sharded by FSDP2, every rank its part.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from weightwire.diff.cast import cast
from weightwire.errors import ExtraMissing, ResyncError, RetryError, StopError
from weightwire.events import Published
from weightwire.publisher import Publisher
from weightwire.store.contract import ObjectStore
from weightwire.trainers.hf_companions import save_companions

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ExtraMissing(
        f"the callback needs transformers: pip install 'transformers[torch]>=5' ({error})"
    ) from None

from weightwire.trainers.hf_checkpoint import HfCheckpoint
from weightwire.trainers.sharded import ShardedPublisher

log = logging.getLogger("weightwire.trainers")


class WeightwireCallback(TrainerCallback):  # type: ignore[misc]
    """Publishes a trainer's model under the names and in the shapes of its checkpoint."""

    def __init__(
        self,
        store: str | os.PathLike[str] | ObjectStore,
        *,
        every: int = 1,
        dtype: str | None = "bf16",
        wait: bool = True,
        companions: Path | None = None,
        on_published: Callable[[Published], None] = lambda _: None,
        **options: Any,
    ) -> None:
        """Remember what to do; the store is opened when training begins.

        Args:
            every: publish after so many optimizer steps; they become one correct diff.
            dtype: what floats are rounded to (``bf16``, ``fp16``); None publishes them as they are.
            wait: when a version is still under way at the next publish, wait for it; else that
                publish is left out, and a later one covers it.
            companions: a folder with files for the anchors, instead of the model's own config and
                tokenizer.
            options: for ``Publisher``: ``mode``, ``key``, ``baseline``, ``anchors``, ``codec``, …

        Raises:
            StopError: ``every`` is less than one.
        """
        if every < 1:
            raise StopError(f"every={every}: publish after one optimizer step or more")
        self._store, self._every, self._dtype, self._wait = store, every, dtype, wait
        self._companions, self._options = companions, options
        self._on_published = on_published
        self._made_folder: tempfile.TemporaryDirectory[str] | None = None
        self._checkpoint: HfCheckpoint | None = None
        self._publisher: Publisher | ShardedPublisher | None = None
        self._last: Future[Published] | None = None
        self._last_step = -1
        self.published: Published | None = None
        """The newest version that exists."""
        self.n_failed = 0
        """Publishes that failed and were covered by a later one, or will be."""

    def attach(self, trainer: Any) -> WeightwireCallback:
        """Add it before the trainer's other callbacks, so that what ``report_to`` names gets its numbers.

        ``trainer.add_callback`` adds it after them: then the numbers are in the trainer's own log.
        """
        trainer.add_callback(self)
        callbacks = trainer.callback_handler.callbacks
        callbacks.insert(0, callbacks.pop())
        return self

    def on_train_begin(
        self, _args: Any, state: Any, _control: Any, model: Any = None, **others: Any
    ) -> None:
        """Publish what training begins with: version 0, or the next one of a run that goes on.

        Raises:
            UnsupportedLayout: adapters, quantised weights, shards that are not FSDP2's.
            StopError: a store that refuses.
        """
        checkpoint = HfCheckpoint(model)
        if checkpoint.is_sharded:
            checkpoint.shards()  # what is refused, is refused by every rank before they begin to talk
        elif not state.is_world_process_zero:
            return
        self._checkpoint = checkpoint
        self._save_companions(checkpoint.model, others.get("processing_class"))
        try:
            self._publish(state.global_step)
        except BaseException:
            self.close()
            raise

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_others: Any) -> None:
        """Publish if this optimizer step is one of those.

        Raises:
            FencedWriter: another trainer took the run over.
            StopError: a store that refuses.
        """
        if state.global_step % self._every == 0:
            self._publish(state.global_step)

    def on_log(
        self,
        _args: Any,
        state: Any,
        _control: Any,
        logs: dict[str, Any] | None = None,
        **_others: Any,
    ) -> None:
        """Add the newest version's numbers to what the trainer logs."""
        numbers = self._numbers()
        if logs is not None:
            logs.update(numbers)
        if state.log_history:
            state.log_history[-1].update(numbers)

    def on_train_end(self, args: Any, state: Any, _control: Any, **_others: Any) -> None:
        """Publish what was not, wait until the last version and its extras exist, and let go.

        Raises:
            StopError: a store that refuses.
        """
        if self._checkpoint is None:
            return
        is_replaced = getattr(args, "load_best_model_at_end", False)
        try:
            if self._has_failed() or self._last_step != state.global_step or is_replaced:
                self._publish(state.global_step)
            self._look_at_last()
        finally:
            self.close()
        if state.log_history:
            state.log_history[-1].update(self._numbers())

    def close(self) -> None:
        """Finish what is under way; for trainings that end with an exception."""
        if self._publisher is not None:
            self._publisher.close()
        if self._made_folder is not None:
            self._made_folder.cleanup()
        self._publisher, self._made_folder, self._checkpoint = None, None, None
        self._last, self._last_step = None, -1

    def _publish(self, step: int) -> None:
        if self._checkpoint is None or not self._is_open(self._checkpoint):
            return
        if self._may_skip() and self._last is not None and not self._last.done():
            return
        self._look_at_last()
        if self._publisher is not None:
            self._last, self._last_step = self._publisher.publish(step=step), step

    def _may_skip(self) -> bool:
        """Ranks that publish together must all do it, whoever is done first."""
        return not self._wait and isinstance(self._publisher, Publisher)

    def _is_open(self, checkpoint: HfCheckpoint) -> bool:
        """A store that is away when training begins is tried again at every publish."""
        if self._publisher is not None:
            return True
        try:
            self._publisher = self._open(checkpoint)
        except (RetryError, ResyncError) as error:
            self._warn(error)
        return self._publisher is not None

    def _open(self, checkpoint: HfCheckpoint) -> Publisher | ShardedPublisher:
        """Of a sharded model every rank publishes its part; else the main process does."""
        kind = ShardedPublisher if checkpoint.is_sharded else Publisher
        return kind(
            self._store,
            self._state(checkpoint),
            companions=self._folder(),
            on_published=self._remember,
            **self._options,
        )

    def _state(self, checkpoint: HfCheckpoint) -> Any:
        state = checkpoint.shards if checkpoint.is_sharded else checkpoint.reader
        if self._dtype is None:
            return state
        wide = checkpoint.keeps_wide(self._dtype)
        return cast(state, self._dtype, only=lambda name: not any(part in name for part in wide))

    def _save_companions(self, model: Any, processing_class: Any) -> None:
        if self._companions is None:
            self._made_folder = tempfile.TemporaryDirectory(prefix="weightwire-companions-")
            folder = Path(self._made_folder.name)
            save_companions(folder, model, processing_class, self._dtype)

    def _folder(self) -> Path | None:
        return Path(self._made_folder.name) if self._made_folder else self._companions

    def _look_at_last(self) -> None:
        """Wait for the last publish; what cannot be tried again stops training here.

        Raises:
            StopError: from the publish.
        """
        if not self._has_failed() or self._last is None:
            return
        error = self._last.exception()
        self._last = None
        if error is not None and not isinstance(error, (RetryError, ResyncError)):
            raise error
        self._warn(error)

    def _has_failed(self) -> bool:
        return self._last is not None and self._last.exception() is not None

    def _warn(self, error: BaseException | None) -> None:
        self.n_failed += 1
        log.warning("training goes on without a new version; the next publish covers it: %s", error)

    def _remember(self, published: Published) -> None:
        self.published = published
        self._on_published(published)

    def _numbers(self) -> dict[str, float]:
        published = self.published
        if published is None:
            return {}
        return {
            "weightwire/version": published.version,
            "weightwire/density": published.density,
            "weightwire/bytes": published.n_bytes,
            "weightwire/read_seconds": published.read_s,
            "weightwire/publish_seconds": published.read_s + published.commit_s,
            "weightwire/failed": self.n_failed,
        }
