"""Who does the work beside the caller: threads by default, the caller itself where order must be replayed."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

_MAY_GO_ON = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
"""Of a generator that waits: to clear it would end it."""


def threads(n_threads: int, name: str, begin: Callable[[], None] | None = None) -> Executor:
    """So many threads, made when first needed; each works on the GPU of whoever asks.

    ``begin`` is what each of them does first.
    """
    return _Threads(n_threads, thread_name_prefix=f"weightwire-{name}", initializer=begin)


def on_this_gpu(work: Callable[[], T]) -> Callable[[], T]:
    """The same for a thread of one's own: the work, on the GPU that is the caller's now."""
    gpu = _current_gpu()
    return work if gpu is None else partial(_on_gpu, gpu, work)


class _Threads(ThreadPoolExecutor):
    """CUDA gives a new thread the first GPU; work in it must not end up on another rank's.

    Merely going back to that GPU, after work elsewhere, takes half a gigabyte of its memory. Each
    piece of work brings its GPU along, since a publisher may be made before there is one.
    """

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Run it in a thread, on the GPU that is the caller's now."""
        gpu = _current_gpu()
        if gpu is None:
            return super().submit(fn, *args, **kwargs)
        return super().submit(_on_gpu, gpu, fn, *args, **kwargs)


def _current_gpu() -> int | None:
    """This thread's, if torch uses any: it is neither loaded nor told to look for one."""
    # Another thread may be in the midst of loading it.
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not hasattr(cuda, "current_device") or not cuda.is_initialized():
        return None
    number: int = cuda.current_device()
    return number


def _on_gpu(number: int, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    if _current_gpu() != number:
        sys.modules["torch"].cuda.set_device(number)
    return fn(*args, **kwargs)


class InlineExecutor(Executor):
    """Does everything at once, in the caller's thread: what a simulation needs."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Run it now; the future is done when it is returned."""
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # what it raised belongs to whoever asks for the result
            future.set_exception(error)
        return future


def finished(result: T) -> Future[T]:
    """A future that is done."""
    future: Future[T] = Future()
    future.set_result(result)
    return future


def failed(error: BaseException) -> Future[Any]:
    """A future that failed."""
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


def forget_frames(error: BaseException) -> None:
    """Let go of all that the functions had in hand that failed; what is told of them stays.

    For errors that are kept: a tensor in a frame would stay on its GPU for as long.
    """
    for each in _with_causes(error):
        traceback.clear_frames(each.__traceback__)
        for frame, _ in traceback.walk_tb(each.__traceback__):
            _clear_callers(frame)


def _with_causes(error: BaseException) -> list[BaseException]:
    found: dict[int, BaseException] = {}
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in found:
            found[id(each)] = each
            waiting += [each.__cause__, each.__context__]
    return list(found.values())


def _clear_callers(frame: FrameType) -> None:
    """A frame holds its caller, which may have caught the error and ended since."""
    while frame.f_back is not None:
        frame = frame.f_back
        if not frame.f_code.co_flags & _MAY_GO_ON:
            with suppress(RuntimeError):  # it has not ended
                frame.clear()


def forget_frames_of(done: Future[Any]) -> None:
    """The same, of the error that a future keeps."""
    error = None if done.cancelled() else done.exception()
    if error is not None:
        forget_frames(error)


def flatten(outer: Future[Future[T]]) -> Future[T]:
    """One future for work that gives a future."""
    flat: Future[T] = Future()

    def then(done: Future[Any], go_on: Callable[[Any], object]) -> None:
        error = done.exception()
        if error is None:
            go_on(done.result())
        else:
            flat.set_exception(error)

    outer.add_done_callback(
        lambda done: then(
            done, lambda inner: inner.add_done_callback(lambda last: then(last, flat.set_result))
        )
    )
    return flat
