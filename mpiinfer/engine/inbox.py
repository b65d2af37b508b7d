"""Where the requests of a run come from, and where their outputs go: `Inbox`, and its two kinds.

Promises: asking never blocks, since the head asks between steps. `LiveInbox` may be used from any thread while the
engine runs. Refuses to know how requests are computed and on which replica.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from threading import Event, Lock

from mpiinfer.comm.waits import IDLE_SLEEP_S, rest
from mpiinfer.engine.request import Output, Request

OnFinish = Callable[[Output], None]


class Inbox(ABC):
    """A queue of requests, each given out once."""

    @property
    @abstractmethod
    def num_ready(self) -> int:
        """Requests that may begin now."""

    @abstractmethod
    def take(self, count: int) -> list[Request]:
        """The next `count` requests that may begin now, or as many as there are."""

    @abstractmethod
    def take_cancelled(self) -> list[int]:
        """Indices of requests that nobody waits for any more, each given once."""

    @property
    @abstractmethod
    def is_closed(self) -> bool:
        """Whether all requests there will ever be were taken."""

    @abstractmethod
    def deliver(self, output: Output) -> None:
        """The answer to a request."""

    def rest(self) -> None:
        """Sleep for a moment, or until there may be something."""
        rest()

    def end(self) -> None:  # noqa: B027
        """The run has ended on this replica."""


class ListInbox(Inbox):
    """The requests of one call. arrivals_s: seconds from now at which each may begin, ascending (None: all at once)."""

    def __init__(
        self, requests: Sequence[Request], arrivals_s: Sequence[float] | None = None, on_finish: OnFinish | None = None
    ) -> None:
        assert arrivals_s is None or list(arrivals_s) == sorted(arrivals_s)
        self.outputs: list[Output] = []
        self._requests = requests
        self._arrivals_s = arrivals_s
        self._on_finish = on_finish
        self._start_s = time.perf_counter()
        self._num_taken = self._num_arrived = 0

    @property
    def num_ready(self) -> int:
        if self._arrivals_s is None:
            self._num_arrived = len(self._requests)
        else:
            now_s = time.perf_counter() - self._start_s
            while self._num_arrived < len(self._requests) and self._arrivals_s[self._num_arrived] <= now_s:
                self._num_arrived += 1
        return self._num_arrived - self._num_taken

    def take(self, count: int) -> list[Request]:
        first, self._num_taken = self._num_taken, self._num_taken + min(count, self.num_ready)
        return list(self._requests[first : self._num_taken])

    def take_cancelled(self) -> list[int]:
        return []

    @property
    def is_closed(self) -> bool:
        return self._num_taken == len(self._requests)

    def deliver(self, output: Output) -> None:
        self.outputs.append(output)
        if self._on_finish is not None:
            self._on_finish(output)


class LiveInbox(Inbox):
    """Requests that come while the engine runs. `submit`, `cancel` and `close` may be called from any thread."""

    def __init__(self, on_finish: OnFinish) -> None:
        """on_finish: called with each output on the engine's thread; it must be quick."""
        self._on_finish = on_finish
        self._lock = Lock()
        self._news = Event()
        self._queue: deque[Request] = deque()
        self._cancelled: list[int] = []
        self._closed = False

    def submit(self, request: Request) -> None:
        """Queue a request, made by `Engine.request`. Its index is the caller's to choose, unique among the unfinished.

        Raises RuntimeError once the inbox was closed.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError("this inbox is closed: it takes no more requests")
            self._queue.append(request)
        self._news.set()

    def cancel(self, index: int) -> None:
        """Stop a request, wherever it is. Its output says "cancelled", unless it has just finished."""
        with self._lock:
            self._cancelled.append(index)
        self._news.set()

    def close(self) -> None:
        """No more requests will come: the run ends when the last one is answered."""
        with self._lock:
            self._closed = True
        self._news.set()

    def rest(self) -> None:
        self._news.wait(IDLE_SLEEP_S)
        self._news.clear()

    @property
    def num_ready(self) -> int:
        return len(self._queue)

    def take(self, count: int) -> list[Request]:
        with self._lock:
            return [self._queue.popleft() for _ in range(min(count, len(self._queue)))]

    def take_cancelled(self) -> list[int]:
        if not self._cancelled:
            return []
        with self._lock:
            taken, self._cancelled = self._cancelled, []
            return taken

    @property
    def is_closed(self) -> bool:
        return self._closed and not self._queue

    def deliver(self, output: Output) -> None:
        self._on_finish(output)
