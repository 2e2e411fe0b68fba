"""Keeps two processes from writing one folder of results. Reading never waits.

The lock is the kernel's (flock): it ends with the process, however that ends. On a network file system it holds
between machines only where that system passes locks on, as NFS does and some cluster file systems do not unless they
are mounted so.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
import weakref
from pathlib import Path

from batchsim.base.errors import ScenarioError

NAME = ".lock"


class FolderLock:
    """A folder that this process alone writes, as long as the object lives. `lock_folder` makes it."""

    def __init__(self, folder: Path) -> None:
        path = folder / NAME
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(file, 0)
            os.write(file, f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%F %T')}".encode())
        except BlockingIOError:
            holder = os.read(file, 200).decode(errors="replace") or "another process"
            os.close(file)
            raise ScenarioError(
                f"{folder}: is being written by {holder}. Wait for its end, stop it, or give another folder with --out."
            ) from None
        except OSError:
            os.close(file)
            raise
        weakref.finalize(self, os.close, file)


_held: weakref.WeakValueDictionary[Path, FolderLock] = weakref.WeakValueDictionary()


def lock_folder(folder: Path) -> FolderLock:
    """The lock of `folder`, which must exist: this process's own if it has it already. ScenarioError if another has.

    OSError where the folder cannot be written or its file system has no locks.
    """
    path = folder.resolve()
    lock = _held.get(path)
    if lock is None:
        lock = _held[path] = FolderLock(folder)
    return lock
