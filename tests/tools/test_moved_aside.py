"""demo.sh and compare.sh move earlier runs aside, but none that still goes on. Stand-ins train nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from megatron_gspo.loop.run_lock import claim

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture
def clone(tmp_path) -> Path:
    (tmp_path / "tools").mkdir()
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for name in ("python", "megatron-gspo"):
        command = tmp_path / ".venv" / "bin" / name
        command.write_text(f'#!/bin/sh\necho "{name} $*"\n')
        command.chmod(0o755)
    for name in ("demo.sh", "compare.sh"):
        shutil.copy(TOOLS / name, tmp_path / "tools")
    (tmp_path / "runs" / "demo_sort_sft" / "hf").mkdir(parents=True)
    (tmp_path / "runs" / "demo_sort_sft" / "hf" / "config.json").touch()
    return tmp_path


def run(clone: Path, script: str) -> tuple[int, str]:
    done = subprocess.run([clone / "tools" / script], capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(("script", "folder"), [("demo.sh", "demo_sort"), ("compare.sh", "compare/gspo")])
def test_the_folder_of_a_run_that_goes_on_stays_its_own(clone, script, folder):
    """Moved aside, it was made anew by the run that wrote to it and by the new one, which shared it."""
    lock = claim(clone / "runs" / folder)
    code, output = run(clone, script)
    assert code == 1 and f"error: a run goes on in runs/{folder}; wait for its end or stop it" in output
    assert (clone / "runs" / folder).is_dir() and f"{folder.split('/')[0]}.yaml" not in output
    os.close(lock)
    code, output = run(clone, script)
    assert code == 0 and f"the earlier runs/{folder.split('/')[0]} is now" in output, output
    assert not (clone / "runs" / folder).exists() and "train recipes/" in output
