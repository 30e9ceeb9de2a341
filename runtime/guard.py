"""What keeps a run safe: its exit codes, the way back after what went wrong, the signals that ask it to
stop."""
import errno
import gc
import os
import signal
import sys
from dataclasses import dataclass

import torch

from runtime import distributed, lock, usage
from runtime.checkpoint import is_full
from runtime.config import BadInput


class Failure(Exception):
    """A run that can't go on, though nothing was wrong with the input. The message is one sentence; exit code
    1. alone: only this rank raises it, and others may be waiting for it."""

    def __init__(self, sentence, alone=True):
        super().__init__(sentence)
        self.alone = alone


class Retry(Exception):
    """A run that can go on from its last checkpoint, in another way than it went: runtime.run.Run has left a
    note that says how. The message is one sentence. alone: only this rank raises it, and others may be
    waiting for it."""

    def __init__(self, sentence, out_dir, alone=False):
        super().__init__(sentence)
        self.out_dir = out_dir
        self.alone = alone


def run(main, argv=None):
    """Call main(argv) and exit: 0 done, 2 bad input with its sentence on standard error, 1 anything else.
    Under torchrun one rank speaks for all that have the same to say; a failure ends the rank that has it at once, for others may
    be waiting for it. argv: the command line's if None."""
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
    except OSError as e:                     # of whatever file, and on whichever rank
        if isinstance(e, PermissionError) or e.errno in (errno.EROFS, errno.ELOOP):
            say_error(f"{e.filename} can't be opened ({e.strerror}): change its permissions, or choose "
                      "another.")
        elif is_full(e):
            say_error(f"{e.filename or 'A file'} could not be written ({e.strerror}): free some space, and "
                      "start again; what was saved before is as it was.")
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
    except RuntimeError as e:
        if "imed out" not in str(e) or distributed.world_size() == 1:
            raise
        print(f"error: Rank {distributed.rank()} waited more than {distributed.STEP_TIMEOUT} for another rank, which hangs: "
              "look at its log, and resume with --init_from=resume.", file=sys.stderr, flush=True)
        os._exit(1)                          # not through an exchange that would wait again
    except KeyboardInterrupt:                # a second Ctrl-C, or one where there is nothing to save
        say_error("interrupted.")
        os._exit(130)
    distributed.close()
    sys.exit(code)


def say_error(sentence):
    print(f"error: {usage.one_line(sentence)}", file=sys.stderr, flush=True)


def exit_code(main, argv):
    """Return what main(argv) does, which is called again as a resume after each Retry. Failure if that can't
    be: of several ranks, the others are waiting for one that raised it alone. The next start goes on then,
    torchrun's own (--max-restarts) too."""
    StopSignal.received = None
    try:
        while True:
            try:
                code = main(argv)
                sys.stdout.flush()           # here, where what fails is said
                return code
            except Retry as e:
                if e.alone and distributed.world_size() > 1:
                    raise Failure(str(e)) from None
                if distributed.is_main():
                    print(e, flush=True)
                argv = ["--init_from=resume", f"--out_dir={e.out_dir}"]      # all knobs are in the run folder
            # By here the exception is gone, and with its traceback all that the failed step held.
            gc.collect()
            torch.compiler.reset()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    finally:
        lock.release_all()                   # of a run that was refused before it began, too


class StopSignal:
    """Ctrl-C, SIGTERM and SIGHUP set `received` instead of ending the process; a second Ctrl-C does end it.
    `received` counts for later StopSignals of the process too, so that a Retry does not lose it."""
    received = None

    def __init__(self):
        signal.signal(signal.SIGTERM, self.note)
        signal.signal(signal.SIGINT, self.note)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:                # nohup's
            signal.signal(signal.SIGHUP, self.note)

    @classmethod
    def note(cls, number, frame):
        if cls.received == number == signal.SIGINT:
            raise KeyboardInterrupt
        cls.received = number

    def requested(self):
        """Tell, on all ranks, whether one of them was asked to stop."""
        return distributed.any(self.received is not None)

    def exit_code(self):
        """Return 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP, as a shell reports them."""
        return 128 + (self.received or signal.SIGTERM)


@dataclass
class NonFinite:
    """What to do about a step whose gradients are not finite: `skip` it; after `patience` in a row
    `rollback`, once; then `stop`. fp16's overflows do not count while the loss scale is still on its way
    down."""
    patience: int = 5
    in_a_row: int = 0
    rolled_back: bool = False

    def after(self, finite, scale=1.0):
        """Return 'ok', 'skip', 'rollback' or 'stop'. scale: GradScaler's, 1 without one."""
        if finite:
            self.in_a_row = 0
            return "ok"
        if scale > 1.0:
            return "skip"
        self.in_a_row += 1
        if self.in_a_row < self.patience:
            return "skip"
        if self.rolled_back:
            return "stop"
        self.in_a_row = 0
        self.rolled_back = True
        return "rollback"


def keep_batch(out_dir, step, **tensors):
    """Put the batch that broke a step on the disk. Returns the file."""
    path = os.path.join(out_dir, f"bad_batch_step_{step}_rank_{distributed.rank()}.pt")
    torch.save(tensors, path)
    return path
