"""Worker processes: copies of a warm one where there is one, gone when their parent is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = """
import sys, time
from tpo_gym.worker_processes import end_with_parent, warm_up, worker_context

def report(found):
    found.put([name for name in ("torch._dynamo", "wave") if name in sys.modules])

def wait(found):
    end_with_parent()
    found.put(None)
    time.sleep(60)

if __name__ == "__main__":
    if "warm" in sys.argv:
        warm_up("wave")
    context = worker_context()
    found = context.Queue()
    worker = context.Process(target=report if "report" in sys.argv else wait, args=(found,))
    worker.start()
    print(context.get_start_method(), worker.pid, found.get(), flush=True)
    worker.join()
"""


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    (folder / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(folder / "program.py"), *words]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.mark.parametrize("words", [(), ("warm",)], ids=["anew", "copies"])
def test_copies_have_imported_everything_and_other_workers_nothing(tmp_path: Path, words: tuple[str, ...]) -> None:
    shown, errors = start(tmp_path, "report", *words).communicate(timeout=120)
    assert errors == ""
    method, _, found = shown.split(maxsplit=2)
    if words and sys.platform == "linux":
        assert (method, found) == ("forkserver", "['torch._dynamo', 'wave']\n")
    else:
        assert (method, found) == ("spawn", "[]\n")


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.parametrize("words", [(), ("warm",)], ids=["anew", "copies"])
def test_a_killed_program_leaves_no_worker(tmp_path: Path, words: tuple[str, ...]) -> None:
    program = start(tmp_path, *words)
    assert program.stdout is not None
    worker = Path("/proc", program.stdout.readline().split()[1])
    assert worker.exists()
    os.kill(program.pid, signal.SIGKILL)
    program.communicate(timeout=60)
    deadline = time.monotonic() + 30
    while worker.exists() and "State:\tZ" not in (worker / "status").read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert time.monotonic() < deadline
