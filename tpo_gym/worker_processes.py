"""Worker processes: soon ready, and never left behind.

A process takes seconds to import torch, and more to make its first optimizer, which imports torch's compiler. On Linux
one process does so while the program is still getting ready, and the workers are copies of it: Python's fork server,
which has a single thread and leaves CUDA alone.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext, SpawnContext

_is_warm = False


def warm_up(*modules: str) -> None:
    """Begin, in the background, to import what the workers of this program need.

    What is set in ``os.environ`` from now on does not reach them.

    Args:
        modules: Names of modules.
    """
    global _is_warm
    if sys.platform != "linux":  # elsewhere forking is not safe, or there is none
        return
    from multiprocessing import forkserver

    forkserver.set_forkserver_preload([*modules, "torch._dynamo"])
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches it too; it ends with this program
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, handler)
    _is_warm = True


def worker_context() -> ForkServerContext | SpawnContext:
    """How to start worker processes: as copies of the one that was warmed up, once it is, else anew."""
    if not _is_warm:
        return multiprocessing.get_context("spawn")
    copies = multiprocessing.get_context("forkserver")
    first = copies.Process(target=int)  # does nothing: Ctrl-C may end the wait for it without a trace
    first.start()
    first.join()
    return copies


def end_with_parent() -> None:
    """Let this worker end as soon as the process that started it has, killed for example.

    Else it would wait for work for ever, or write where a new program writes too.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
