"""What keeps a run safe: its exit codes, the signals that ask it to stop, steps whose gradients are not finite."""
import os
import signal
import sys
from dataclasses import dataclass

import torch

from runtime import distributed
from runtime.config import BadInput


class Failure(Exception):
    """A run that can't go on, though nothing was wrong with the input. The message is one sentence; exit code 1."""


def run(main):
    """Call main() and exit: 0 done, 2 bad input with its sentence on standard error, 1 anything else. Under torchrun the
    first rank speaks for all; a failure ends the rank that has it at once, for others may be waiting for it."""
    try:
        code = main()
    except BadInput as e:
        if distributed.is_main():
            print(f"error: {e}", file=sys.stderr)
        code = 2
    except PermissionError as e:             # of whatever file, and on whichever rank
        print(f"error: {e.filename} can't be opened ({e.strerror}): change its permissions, or choose another.",
              file=sys.stderr, flush=True)
        if distributed.world_size() > 1:
            os._exit(2)
        code = 2
    except Failure as e:
        print(f"error: {e}", file=sys.stderr, flush=True)
        os._exit(1)
    except KeyboardInterrupt:                # a second Ctrl-C, or one where there is nothing to save
        print("error: interrupted.", file=sys.stderr, flush=True)
        os._exit(130)
    distributed.close()
    sys.exit(code)


class StopSignal:
    """Ctrl-C and SIGTERM set `received` instead of ending the process; a second Ctrl-C does end it."""

    def __init__(self):
        self.received = None
        signal.signal(signal.SIGTERM, self.note)
        signal.signal(signal.SIGINT, self.note)

    def note(self, number, frame):
        if self.received == number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number

    def requested(self):
        """True on all ranks once one of them was asked to stop."""
        return distributed.any(self.received is not None)

    def exit_code(self):
        """130 after Ctrl-C, 143 after SIGTERM, as a shell reports them."""
        return 128 + (self.received or signal.SIGTERM)


@dataclass
class NonFinite:
    """What to do about a step whose gradients are not finite: `skip` it; after `patience` in a row `rollback`, once;
    then `stop`. fp16's overflows do not count while the loss scale is still on its way down."""
    patience: int = 5
    in_a_row: int = 0
    rolled_back: bool = False

    def after(self, finite, scale=1.0):
        """'ok', 'skip', 'rollback' or 'stop'. scale: GradScaler's, 1 without one."""
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
        self.in_a_row, self.rolled_back = 0, True
        return "rollback"


def keep_batch(out_dir, step, **tensors):
    """Put the batch that broke a step on the disk; returns the file."""
    path = os.path.join(out_dir, f"bad_batch_step_{step}_rank_{distributed.rank()}.pt")
    torch.save(tensors, path)
    return path
