"""What the sampling process adds to its errors; the process itself takes part in test_end_to_end.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron_gspo.loop.sampling import _told_of


def test_a_failure_tells_of_the_servers_that_have_ended():
    running = SimpleNamespace(last_words=lambda: "")
    ended = SimpleNamespace(last_words=lambda: "the SGLang server ended: out of memory")
    with pytest.raises(ConnectionError) as caught, _told_of([running, ended]):
        raise ConnectionError("refused")
    assert caught.value.__notes__ == ["the SGLang server ended: out of memory"]
