"""The start of a script, before PyTorch is imported: --help, a message while PyTorch loads, and output
streams that survive a closed terminal or pipe."""
import contextlib
import errno
import importlib
import os
import re
import signal
import sys
from pathlib import Path

CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")             # control characters but line break and tab


def first_line():
    """Print --help and exit if it is asked for; else print a first line on a terminal. Call it before PyTorch
    is imported, which takes seconds."""
    if sys.platform == "win32":
        print("error: nanoRFT runs on Linux, macOS and WSL: on Windows, run it in WSL.", file=sys.stderr)
        sys.exit(2)
    multiprocessing = sys.modules.get("multiprocessing")
    if multiprocessing and multiprocessing.parent_process():
        return                               # a loader process imports the script again
    script = Path(sys.argv[0])
    if script.suffix != ".py" or not script.is_file():
        return
    source = script.read_text(encoding="utf-8")
    if "\nclass Config" not in source:
        return
    protect_output()
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupted)             # until guard.run
    if {"-h", "--help"} & {*sys.argv[1:]}:
        from runtime.help import help_text   # most runs need none
        print(help_text(source), flush=True)
        sys.exit(0)
    if sys.stdout.isatty() and is_first_rank():
        print("Loading PyTorch ...", flush=True)


def interrupted(*_):
    """Exit on a Ctrl-C that comes before guard.run."""
    if is_first_rank():
        print("error: interrupted.", file=sys.stderr, flush=True)
    os._exit(130)


class Output:
    """Standard output or error that drops text once its terminal or reader is gone, so that runs go on."""

    ends = False                             # whether the script exits when its reader is gone

    def __init__(self, stream, is_result):
        """is_result: True for standard output."""
        self.stream = stream
        self.is_result = is_result
        self.is_terminal = stream.isatty()

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text):
        # Not on standard error, where libraries draw progress bars.
        shown = visible(text) if self.is_terminal and self.is_result else text
        return self.attempt(lambda: self.stream.write(shown))

    def flush(self):
        self.attempt(self.stream.flush)

    def attempt(self, action):
        try:
            return action()
        except OSError as e:
            if Output.ends and self.is_result and e.errno not in (errno.EPIPE, errno.EIO):
                raise                        # the result is lost, for example on a full disk
            # Later writes, and the flush at exit, must not fail.
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
            if Output.ends and self.is_result:
                sys.exit(128 + signal.SIGPIPE)


def protect_output():
    """Replace standard output and error by Outputs, and escape characters that they can't encode."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:                   # closed: the next open file would take its number
            stream = open(os.devnull, "w")
        if not isinstance(stream, Output):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")
            setattr(sys, name, Output(stream, name == "stdout"))


def end_with_reader():
    """Exit when the reader of standard output is gone, as `| head` expects; for scripts that only print."""
    Output.ends = True


def visible(text):
    """Escape control characters, which a terminal would obey."""
    return CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def one_line(text):
    return visible(str(text)).replace("\n", "\\n")


def load_package(name, package=None):
    """Import a module of an optional package; an ImportError names the cause and the remedy."""
    package = package or name.partition(".")[0]
    top = package.replace("-", "_")
    try:
        importlib.import_module(top)
        return importlib.import_module(name)
    except Exception as e:                   # such as an old numpy or a missing system library
        if isinstance(e, ModuleNotFoundError) and e.name == top:
            raise ImportError(f"the package {package} is missing: pip install {package}") from None
        reason = one_line(e).strip().rstrip(".")[:200] or type(e).__name__
        raise ImportError(f"the package {package} is installed, but its import fails ({reason}): fix that, "
                          f"perhaps with pip install --upgrade {package}") from None


def is_first_rank():
    """Return whether this process is torchrun's rank 0 or runs alone."""
    return os.environ.get("RANK", "0") == "0"
