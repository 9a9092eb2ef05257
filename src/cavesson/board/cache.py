"""A cache of recent results."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Cache:
    """Keeps the most recently used results of each kind; concurrent requests for a result share one computation."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._renewing = threading.Lock()
        self._kinds: dict[str, OrderedDict[Hashable, Future[Any]]] = {}

    def get(self, kind: str, key: Hashable, compute: Callable[[], T], most: int) -> T:
        """Return a cached result, computed first if necessary, of a kind of which ``most`` are kept.

        The key is everything on which the result depends.
        """
        with self._lock:
            answers = self._kinds.setdefault(kind, OrderedDict())
            future = answers.get(key)
            if mine := future is None:
                future = answers[key] = Future()
            answers.move_to_end(key)
            while len(answers) > most:
                answers.popitem(last=False)
        if mine:
            try:
                future.set_result(compute())
            except BaseException as error:
                with self._lock:
                    answers.pop(key, None)
                future.set_exception(error)
        answer: T = future.result()
        return answer

    def latest(self, kind: str, key: Hashable, renew: Callable[[T | None], T], most: int = 3) -> T:
        """Return and keep what ``renew`` makes of the last result for the key, or of None if there is none yet."""
        # Renew one at a time, so that two equal requests do not both compute the result.
        with self._renewing:
            with self._lock:
                answers = self._kinds.setdefault(kind, OrderedDict())
                old = answers.get(key)
            answer: Future[T] = Future()
            answer.set_result(renew(None if old is None else old.result()))
            with self._lock:
                answers[key] = answer
                answers.move_to_end(key)
                while len(answers) > most:
                    answers.popitem(last=False)
            return answer.result()
