"""Who does the work beside the caller: threads by default, the caller itself where order must be replayed."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


def threads(n_threads: int, name: str) -> Executor:
    """So many threads, made when first needed."""
    return ThreadPoolExecutor(n_threads, thread_name_prefix=f"weightwire-{name}")


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
