"""One writer in a place: a lock that the kernel lets go of when its process ends, however that ends."""
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

from runtime.config import BadInput, in_the_way


WAIT = 2.0                                   # seconds for a process that is just ending, at a restart
NAME = "run.lock"                            # in a run folder
FIRST_WORDS = "Held by process "             # of what a lock file says

held = {}                                    # {path: open file}; until the process ends, so a Retry keeps them


def take(path, place, knob="--out_dir="):
    """Lock a file, which is made if need be and says who holds it. BadInput if another process holds it, or
    if it is something else; a warning where the file system has no locks. What this process holds it may take
    again. place, knob: what is locked, and the flag that names it, for people."""
    path = resolved(path)
    if path in held:
        return
    file = open_locked(path, place, knob)
    with contextlib.suppress(OSError):       # of a full disk: then it does not say who
        file.truncate(0)
        file.write(f"{FIRST_WORDS}{os.getpid()} on {socket.gethostname()}, since "
                   f"{datetime.datetime.now():%Y-%m-%d %H:%M:%S}: {shlex.join(sys.argv)}\n")
        file.flush()
    held[path] = file


def open_locked(path, place, knob):
    """Return the lock file of that path, open and locked."""
    began = time.monotonic()
    while True:
        try:
            file = open(path, "a+", encoding="utf-8", errors="replace", opener=open_own)
            file.seek(0)
            holder = file.readline().strip()
        except OSError as e:
            raise BadInput(f"{path}, the lock of {place}, can't be opened ({e.strerror or e}): mend that, or "
                           f"choose another {knob}.") from None
        if holder and not holder.startswith(FIRST_WORDS):
            file.close()
            raise in_the_way(path, "a lock of ours", knob)
        try:
            if fcntl is None:
                raise OSError("this system has none")
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            if time.monotonic() - began > WAIT:
                raise BadInput(f"Another run is writing {place} ({holder or 'it does not say which'}): wait for its "
                               f"end, stop it, or choose another {knob}.") from None
            time.sleep(0.1)
            continue
        except OSError as e:
            print(f"{place} is on a file system without locks ({e.strerror or e}): see to it that no second run "
                  "writes there.", flush=True)
            return file
        # Whoever held it may have removed the file after it was opened here: then another may have made a new
        # one.
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
            return file
        file.close()


def resolved(path):
    return Path(os.path.realpath(Path(path).parent), Path(path).name)


def open_own(path, flags):
    """Open a file through no link."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def release(path):
    """Let go of a lock, and remove its file."""
    file = held.pop(resolved(path), None)
    if file:
        Path(path).unlink(missing_ok=True)
        file.close()


def release_all():
    for path in list(held):
        release(path)


def close_all():
    """Let go of copies: a forked process (a loader's) must not keep what its parent holds."""
    for file in held.values():
        file.close()
    held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=close_all)
