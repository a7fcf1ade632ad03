"""Where the seconds of a step go."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Phases:
    """Adds up the seconds spent in named spans; a span may be entered several times a step."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Counts the body's seconds to phase `name`, whether it returns or raises. Spans are not nested."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """Seconds as `time/<phase>` and, as `time/step`, all seconds since the last call; starts the next step."""
        now = time.perf_counter()
        taken = {f"time/{name}": seconds for name, seconds in self._seconds.items()} | {"time/step": now - self._since}
        self._seconds, self._since = {}, now
        return taken
