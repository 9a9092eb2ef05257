"""Answers that were computed lately."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Memory:
    """Keeps the newest answers of each kind; who asks for one that is being computed waits for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._renewing = threading.Lock()
        self._kinds: dict[str, OrderedDict[Hashable, Future[Any]]] = {}

    def get(self, kind: str, key: Hashable, compute: Callable[[], T], most: int) -> T:
        """Returns an answer.

        Args:
            kind: Of what.
            key: What the answer depends on.
            compute: Computes it.
            most: How many answers of the kind to keep.
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
        """Returns what ``renew`` makes of the last answer for the key, or of None; that is the next last answer."""
        # One after another, so that two requests for the same do not both compute it.
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
