"""What a script says at once: its --help, read off its own source, or that PyTorch is being loaded."""
import ast
import os
import re
import sys
from pathlib import Path


def first_line():
    """Print the help of the script that was started and exit, if the command line asks for it; else say to a
    terminal that it takes a moment. Called before PyTorch is imported, which takes seconds."""
    script = Path(sys.argv[0])
    if script.suffix != ".py" or not script.is_file():
        return
    source = script.read_text(encoding="utf-8")
    if "\nclass Config:" not in source:
        return
    if {"-h", "--help"} & {*sys.argv[1:]}:
        try:
            print(help_text(source), flush=True)
        except BrokenPipeError:                               # the reader has seen enough
            os._exit(0)
        sys.exit(0)
    if sys.stdout.isatty() and is_first_rank():
        print("Loading PyTorch ...", flush=True)


def is_first_rank():
    """Tell whether this process speaks for all that torchrun started, or is alone."""
    return os.environ.get("RANK", "0") == "0"


def help_text(source):
    """Return a script's docstring, and every knob with its default, the values it admits and its comment."""
    lines = []
    knobs = source.partition("\nclass Config:\n")[2]
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
