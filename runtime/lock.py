"""flock on a run folder, so that two processes never write to it; the kernel releases it at process exit."""
import contextlib
import datetime
import os
import shlex
import socket
import sys
import time
from pathlib import Path

try:
    import fcntl
except ImportError:                          # Windows
    fcntl = None

from runtime.config import BadInput, would_overwrite

WAIT = 2.0                                   # seconds; at a restart the holder may be about to exit
NAME = "run.lock"                            # in a run folder
LOCK_PREFIX = "Held by process "             # first words of every lock file

held = {}                                    # {path: open file}; a Retry keeps them


def take(path, place, option="--out_dir="):
    """Lock a file, created if absent, and write the holder into it; this process may take it again.
    BadInput if another process holds it or the file is no lock; prints a warning on a file system without
    locks. place, option: for messages, the locked path and the flag that sets it."""
    path = resolved(path)
    if path in held:
        return
    file = open_locked(path, place, option)
    with contextlib.suppress(OSError):       # on a full disk the file does not name its holder
        file.truncate(0)
        file.write(f"{LOCK_PREFIX}{os.getpid()} on {socket.gethostname()}, since "
                   f"{datetime.datetime.now():%Y-%m-%d %H:%M:%S}: {shlex.join(sys.argv)}\n")
        file.flush()
    held[path] = file


def open_locked(path, place, option):
    """Return the lock file, open and locked."""
    began = time.monotonic()
    while True:
        try:
            file = open(path, "a+", encoding="utf-8", errors="replace", opener=open_own)
            file.seek(0)
            holder = file.readline().strip()
        except OSError as e:
            raise BadInput(f"{path}, the lock of {place}, can't be opened ({e.strerror or e}): fix that, or "
                           f"choose another {option}.") from None
        if holder and not holder.startswith(LOCK_PREFIX):
            file.close()
            raise would_overwrite(path, "a nanoRFT lock", option)
        try:
            if fcntl is None:
                raise OSError("Windows has no flock")
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            if time.monotonic() - began > WAIT:
                raise BadInput(f"Another run is writing to {place} ({holder or 'holder unknown'}): wait for "
                               f"its end, stop it, or choose another {option}.") from None
            time.sleep(0.1)
            continue
        except OSError as e:
            print(f"{place} is on a file system without locks ({e.strerror or e}): make sure that no second "
                  "run writes there.", flush=True)
            return file
        # The last holder may have removed the file after it was opened here, and another process may have
        # created a new one.
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
            return file
        file.close()


def resolved(path):
    return Path(os.path.realpath(Path(path).parent), Path(path).name)


def open_own(path, flags):
    """Open a file without following links."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def release(path):
    """Release a lock and remove its file."""
    file = held.pop(resolved(path), None)
    if file:
        Path(path).unlink(missing_ok=True)
        file.close()


def release_all():
    for path in list(held):
        release(path)


def close_all():
    """Close a forked process's copies (a loader's), which would keep its parent's locks."""
    for file in held.values():
        file.close()
    held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=close_all)
