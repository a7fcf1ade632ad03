from __future__ import annotations

import time

import pytest

from megatron_gspo.observe import Phases


def test_seconds_add_up_per_phase_and_start_anew_each_step():
    phases = Phases()
    for _ in range(2):
        with phases.span("update"):
            time.sleep(0.02)
    with pytest.raises(RuntimeError), phases.span("sync"):
        time.sleep(0.01)
        raise RuntimeError
    time.sleep(0.03)
    taken = phases.take()
    assert 0.04 <= taken["time/update"] < 0.3
    assert taken["time/sync"] >= 0.01
    assert taken["time/step"] >= taken["time/update"] + taken["time/sync"] + 0.03
    assert phases.take().keys() == {"time/step"}
