"""--help, read off a script's own source: it need not wait for PyTorch."""
import ast
import os
import re
import sys
from pathlib import Path


def answer_help():
    """Print the help of the script that was started and exit, if the command line asks for it. Called before
    PyTorch is imported, which takes seconds."""
    script = Path(sys.argv[0])
    if not {"-h", "--help"} & {*sys.argv[1:]} or script.suffix != ".py" or not script.is_file():
        return
    source = script.read_text(encoding="utf-8")
    if "\nclass Config:" in source:
        try:
            print(help_text(source), flush=True)
        except BrokenPipeError:                               # the reader has seen enough
            os._exit(0)
        sys.exit(0)


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
