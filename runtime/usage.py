"""The start of a script: its --help, read off its own source, a word while PyTorch is being loaded, and
standard output and error that can't end it. Imports no torch."""
import ast
import contextlib
import errno
import importlib
import os
import re
import signal
import sys
from pathlib import Path

CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")             # all but line break and tab


def first_line():
    """Print the help of the script that was started and exit, if the command line asks for it; else say to a
    terminal that it takes a moment. Called before PyTorch is imported, which takes seconds."""
    if sys.platform == "win32":
        print("error: nanoRFT runs on Linux, macOS and WSL: on Windows, run it in WSL.", file=sys.stderr)
        sys.exit(2)
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
        print(help_text(source), flush=True)
        sys.exit(0)
    if sys.stdout.isatty() and is_first_rank():
        print("Loading PyTorch ...", flush=True)


def interrupted(*_):
    """End at a Ctrl-C before there is anything to save."""
    if is_first_rank():
        print("error: interrupted.", file=sys.stderr, flush=True)
    os._exit(130)


class Output:
    """Standard output or error. Text that can't be written, because the terminal or the reader of a pipe is
    gone, is dropped: no run ends because of it."""

    ends = False                             # the script ends with the reader of its output

    def __init__(self, stream, is_result):
        self.stream = stream
        self.is_result = is_result           # standard output
        self.is_terminal = stream.isatty()

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text):
        # libraries draw their bars on standard error
        shown = visible(text) if self.is_terminal and self.is_result else text
        return self.attempt(lambda: self.stream.write(shown))

    def flush(self):
        self.attempt(self.stream.flush)

    def attempt(self, action):
        try:
            return action()
        except OSError as e:
            if Output.ends and self.is_result and e.errno not in (errno.EPIPE, errno.EIO):
                raise                        # the result is lost: a full disk, say
            # So that the rest, and the flush at the end, do not fail.
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
            if Output.ends and self.is_result:
                sys.exit(128 + signal.SIGPIPE)


def protect_output():
    """Make standard output and error outlive their readers, and escape characters that they can't encode."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:                   # closed, and its number would be that of the next file
            stream = open(os.devnull, "w")
        if not isinstance(stream, Output):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")
            setattr(sys, name, Output(stream, name == "stdout"))


def end_with_reader():
    """End the script, as `| head` expects, when nobody reads its output any more: it makes nothing else."""
    Output.ends = True


def visible(text):
    """Return a text with its control characters escaped: a terminal would obey those of a stranger's file."""
    return CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def one_line(text):
    return visible(str(text)).replace("\n", "\\n")


def load_package(name, package=None):
    """Import a module of a package that few commands need. ImportError says in a sentence's words that it is
    missing, or why it can't be imported, and what to do."""
    package = package or name.partition(".")[0]
    top = package.replace("-", "_")
    try:
        importlib.import_module(top)
        return importlib.import_module(name)
    except Exception as e:                   # of any kind: an old numpy, a missing library of the system's
        if isinstance(e, ModuleNotFoundError) and e.name == top:
            raise ImportError(f"the package {package} is missing: pip install {package}") from None
        reason = one_line(e).strip().rstrip(".")[:200] or type(e).__name__
        raise ImportError(f"the package {package} is installed, but its import fails ({reason}): mend that, "
                          f"perhaps with pip install --upgrade {package}") from None


def is_first_rank():
    """Tell whether this process speaks for all that torchrun started, or is alone."""
    return os.environ.get("RANK", "0") == "0"


def help_text(source):
    """Return a script's docstring, and every knob with its default, the values it admits and its comment."""
    lines = []
    knobs = source.partition("\nclass Config:\n")[2]
    if not knobs:
        knobs = source.partition("\nclass Config(RunOptions):\n")[2].partition("\n\n")[0] + "\n"
        knobs += (Path(__file__).parent / "options.py").read_text(encoding="utf-8").partition("class RunOptions:\n")[2]
    for line in knobs.splitlines():
        if re.match(r"\S|    (@|def )", line):            # the class, or its fields, end here
            break
        if heading := re.match(r"    # (.*)", line):
            lines.append(f"\n{heading[1]}")
        elif knob := re.match(r"    (\w+): (.*?) = ([^#]*?)\s*(?:# (.*))?$", line):
            name, kind, default, comment = knob.groups()
            values = " | ".join(re.findall(r'"([^"]*)"', kind))
            about = ". ".join(filter(None, (values, comment)))
            lines.append(f"  --{name + '=' + default:<40} {about}".rstrip())
        elif further := re.match(r" {20,}# (.*)", line):
            lines[-1] += f" {further[1]}"
    return f"{(ast.get_docstring(ast.parse(source)) or '').strip()}\n" + "\n".join(lines)
