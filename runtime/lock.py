"""flock on a run folder, so that two processes never write to it; the kernel releases it at process exit."""
import contextlib
import datetime
import fcntl
import os
import shlex
import socket
import sys
from pathlib import Path

from runtime.config import BadInput, would_overwrite

NAME = "run.lock"                            # in a run folder
LOCK_PREFIX = "Held by process "             # first words of every lock file

held = {}                                    # {path: open file}; a Retry keeps them


def take(path, place, option="--out_dir="):
    """Lock a file, created if absent, and write the holder into it; this process may take it again.
    BadInput if another process holds it or the file is no lock; prints a warning on a file system without
    locks. place, option: for messages, the locked path and the flag that sets it."""
    path = Path(path)
    if path in held:
        return
    try:
        file = open(path, "a+", encoding="utf-8", errors="replace")
        file.seek(0)
        holder = file.readline().strip()
    except OSError as e:
        raise BadInput(f"{path}, the lock of {place}, can't be opened ({e.strerror or e}): fix that, or "
                       f"choose another {option}.") from None
    if holder and not holder.startswith(LOCK_PREFIX):
        raise would_overwrite(path, "a nanoRFT lock", option)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The last holder may have removed the file after it was opened here: then it locks nothing.
        taken = os.fstat(file.fileno()).st_nlink == 0
    except BlockingIOError:
        taken = True
    except OSError as e:
        taken = False
        print(f"{place} is on a file system without locks ({e.strerror or e}): make sure that no second run "
              "writes there.", flush=True)
    if taken:
        raise BadInput(f"Another run is writing to {place} ({holder or 'holder unknown'}): wait for its end, "
                       f"stop it, or choose another {option}.")
    with contextlib.suppress(OSError):       # on a full disk the file does not name its holder
        file.truncate(0)
        file.write(f"{LOCK_PREFIX}{os.getpid()} on {socket.gethostname()}, since "
                   f"{datetime.datetime.now():%Y-%m-%d %H:%M:%S}: {shlex.join(sys.argv)}\n")
        file.flush()
    held[path] = file


def release(path):
    """Release a lock and remove its file."""
    file = held.pop(Path(path), None)
    if file:
        Path(path).unlink(missing_ok=True)
        file.close()


def close_all():
    """Close a forked process's copies (a loader's), which would keep its parent's locks."""
    for file in held.values():
        file.close()
    held.clear()


os.register_at_fork(after_in_child=close_all)
