"""Exit codes, retries after failures and stop signals."""
import contextlib
import errno
import gc
import os
import signal
import sys

import torch

from runtime import distributed, lock, usage
from runtime.checkpoint import is_full
from runtime.config import BadInput


class Failure(Exception):
    """Failed run with valid input; exit code 1. The message is one sentence. alone: only this rank raises it,
    and others may be waiting for it."""

    def __init__(self, sentence, alone=True):
        super().__init__(sentence)
        self.alone = alone


class Retry(Exception):
    """Failed run that can resume from its last checkpoint, with the changes in the retry file. The message is
    one sentence. alone: only this rank raises it, and others may be waiting for it."""

    def __init__(self, sentence, out_dir, alone=False):
        super().__init__(sentence)
        self.out_dir = out_dir
        self.alone = alone


def run(main, argv=None):
    """Call main(argv) and exit with 0, with 2 and a sentence on stderr for bad input, or with 1 for any other
    failure. Under torchrun one rank prints an error that several have, and a failed rank exits at once, since
    others may be waiting for it. argv: None for the command line."""
    usage.protect_output()
    usage.Output.ends = False
    if signal.getsignal(signal.SIGINT) == usage.interrupted:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code = exit_code(main, sys.argv[1:] if argv is None else argv)
    except BadInput as e:
        if distributed.is_first_to_say(str(e)):
            say_error(e)
        code = 2
    except OSError as e:                     # of any file, on any rank
        if isinstance(e, PermissionError) or e.errno in (errno.EROFS, errno.ELOOP, errno.ENAMETOOLONG):
            say_error(f"{e.filename} can't be opened ({e.strerror}): change its permissions, or choose "
                      "another.")
        elif is_full(e):
            say_error(f"{e.filename or 'A file'} could not be written ({e.strerror}): free some space and "
                      "start again; earlier checkpoints are intact.")
        else:
            raise
        if distributed.world_size() > 1:
            os._exit(2)
        code = 2
    except Failure as e:
        if e.alone or distributed.is_main():
            say_error(e)
        if e.alone and distributed.world_size() > 1:
            os._exit(1)
        code = 1
    except (RuntimeError, MemoryError) as e:
        several = distributed.world_size() > 1
        if is_out_of_memory(e):
            reason = str(e).strip().partition("\n")[0] or type(e).__name__
            say_error(f"Out of memory ({reason}): lower the batch size or the context, or choose a smaller "
                      "model or a device with more free memory.")
        elif "imed out" in str(e) and several:
            say_error(f"Rank {distributed.rank()} waited more than {distributed.STEP_TIMEOUT} for another "
                      "rank, which hangs: look at its log, and resume with --init_from=resume.")
        else:
            raise
        if several:
            os._exit(1)                      # a regular exit would wait for the other rank
        code = 1
    except KeyboardInterrupt:                # a second Ctrl-C, or one with nothing to save
        say_error("interrupted.")
        os._exit(130)
    distributed.close()
    sys.exit(code)


def is_out_of_memory(error):
    """Return whether an error comes from an allocator (CPU, CUDA, MPS), directly, through a compiler or from
    the capture of a CUDA graph."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if "captur" in str(error) and error.__context__:
        return is_out_of_memory(error.__context__)
    phrases = ("out of memory", "can't allocate memory", "not enough memory", "ALLOC_FAILED", "bad_alloc")
    return any(phrase in str(error) for phrase in phrases)


def say_error(sentence):
    print(f"error: {usage.one_line(sentence)}", file=sys.stderr, flush=True)


def exit_code(main, argv):
    """Return main(argv)'s exit code. After each Retry, call main again as a resume. If one of several ranks
    raises it alone, raise Failure: then a restart, also by torchrun --max-restarts, resumes."""
    StopSignal.received = None
    try:
        while True:
            try:
                code = main(argv)
                sys.stdout.flush()           # so that a failure is caught here
                return code
            except Retry as e:
                if e.alone and distributed.world_size() > 1:
                    raise Failure(str(e)) from None
                if distributed.is_main():
                    print(e, flush=True)
                argv = ["--init_from=resume", f"--out_dir={e.out_dir}"]      # the run folder has the others
            # The exception is gone, and with its traceback all tensors of the failed step.
            gc.collect()
            torch.compiler.reset()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    finally:
        for path in list(lock.held):
            lock.release(path)               # also of a run that raised BadInput


class StopSignal:
    """Sets `received` at Ctrl-C, SIGTERM or SIGHUP instead of ending the process, and says on standard error
    that the run will stop; a second Ctrl-C ends it. The class keeps `received`, so that a Retry does not lose
    it."""
    received = None

    def __init__(self, until, unsaved):
        """until: function that returns the end of the message's "Stopping after ...", or None. unsaved: the
        work that a second signal loses."""
        self.until = until
        self.unsaved = unsaved
        signal.signal(signal.SIGTERM, self.receive)
        signal.signal(signal.SIGINT, self.receive)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:                # set by nohup
            signal.signal(signal.SIGHUP, self.receive)

    def receive(self, number, frame):
        if StopSignal.received == number == signal.SIGINT:
            raise KeyboardInterrupt
        first = StopSignal.received is None
        StopSignal.received = number
        if first and distributed.is_main():
            again = "A second Ctrl-C" if number == signal.SIGINT else "SIGKILL"
            until = self.until() if self.until else "this step and its checkpoint"
            message = f"\nStopping after {until}. {again} stops now and loses {self.unsaved}.\n"
            with contextlib.suppress(OSError):           # after SIGHUP there may be no terminal
                os.write(2, message.encode())            # a signal may interrupt print(), which then fails

    def requested(self):
        """Tell whether any rank received a signal. Every rank must call."""
        return distributed.on_any_rank(self.received is not None)

    def exit_code(self):
        """Return 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP, as a shell reports them."""
        return 128 + (self.received or signal.SIGTERM)
