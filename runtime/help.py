"""The text of --help, from the source of a script: its docstring, and the fields of its Config with their
comments. Loaded when --help is asked; it imports neither the script nor PyTorch."""
import ast
import shutil
import textwrap
import tokenize
from pathlib import Path
from typing import NamedTuple

NARROWEST = 60                           # columns, whatever the terminal
WIDEST = 110
RUN_OPTIONS = Path(__file__).with_name("options.py")     # base class of train.py's and grpo.py's Config


class Option(NamedTuple):
    """A field of a Config, as its source has it."""
    name: str
    default: str                         # as in a flag: without quotation marks
    choices: list                        # texts; [] for an option that is not one of several words
    comment: str


def help_text(source, width=None):
    """Return a script's docstring and its options by section, wrapped. width: columns, by default the
    terminal's, between NARROWEST and WIDEST."""
    columns = width or shutil.get_terminal_size().columns
    columns = max(NARROWEST, min(WIDEST, columns))
    parts = [wrapped_docstring(ast.get_docstring(ast.parse(source), clean=False) or "", columns),
             "Options with their defaults, as --key=value:"]
    for heading, options in sections_of(source).items():
        lines = textwrap.wrap(heading, columns)
        for option in options:
            lines += lines_of(option, columns)
        parts.append("\n".join(lines))
    return "\n\n".join(filter(None, parts))


def wrapped_docstring(text, columns):
    """Wrap the paragraphs of a docstring; indented lines, which are commands, remain."""
    lines = []
    paragraph = []
    for line in [*text.splitlines(), ""]:
        if line.strip() and not line.startswith(" "):
            paragraph.append(line)
            continue
        lines += textwrap.wrap(" ".join(paragraph), columns)
        lines.append(line.rstrip())
        paragraph = []
    return "\n".join(lines).strip()


def lines_of(option, columns):
    """Return the lines of an option: the flag with its default on the left, choices and comment on the right,
    each from a line of its own."""
    left = 38 if columns >= 100 else 32 if columns >= 80 else 8
    texts = []
    for text in (" | ".join(option.choices), option.comment):
        texts += textwrap.wrap(text, columns - left, break_on_hyphens=False)
    flag = f"  --{option.name}={option.default}"
    beside = texts.pop(0) if texts and len(flag) < left - 1 else ""
    return [f"{flag:<{left}}{beside}".rstrip(), *(" " * left + text for text in texts)]


def sections_of(source):
    """Return {heading: [Option, ...]} of the Config in a script's source. Options of RunOptions, if Config
    inherits them, come after the script's own, each under its heading."""
    tree = ast.parse(source)
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Config")
    sections = options_in(body, source)
    if "RunOptions" in map(ast.unparse, body.bases):
        shared = RUN_OPTIONS.read_text(encoding="utf-8")
        classes = [node for node in ast.parse(shared).body if isinstance(node, ast.ClassDef)]
        for heading, options in options_in(classes[0], shared).items():
            sections.setdefault(heading, []).extend(options)
    return sections


def options_in(body, source):
    """Return {heading: [Option, ...]} of a class body. A comment in the fields' column is a heading; any
    other belongs to the field above it."""
    lines = source.splitlines(keepends=True)
    last = body.end_lineno
    while last < len(lines) and lines[last].lstrip().startswith("#"):    # the last field's comment
        last += 1
    tokens = tokenize.generate_tokens(iter(lines[:last]).__next__)
    comments = [(*token.start, token.string.lstrip("# "))
                for token in tokens if token.type == tokenize.COMMENT]
    ends = [node.lineno for node in body.body[1:]] + [last + 1]
    sections = {}
    heading = ""
    start = body.lineno
    for node, end in zip(body.body, ends):
        if isinstance(node, ast.FunctionDef):             # the end of the fields
            break
        for line, column, text in comments:
            if start < line < node.lineno and column == node.col_offset:
                heading = text
        own = [text for line, column, text in comments
               if node.lineno <= line < end and column > node.col_offset]
        if isinstance(node, ast.AnnAssign):
            sections.setdefault(heading, []).append(option_of(node, lines, " ".join(own)))
        start = node.lineno
    return sections


def option_of(node, lines, comment):
    """Return the Option of a field. lines: of the source."""
    choices = []
    annotation = ast.unparse(node.annotation)
    for part in annotation.split(" | ") if "Literal[" in annotation else []:
        if part.startswith("Literal"):
            choices += ast.literal_eval(part.removeprefix("Literal[").removesuffix("]") + ",")
        else:
            choices.append({"None": "None", "bool": "true | false"}.get(part, "a number"))
    value = node.value
    default = lines[value.lineno - 1][value.col_offset:value.end_col_offset]     # 1e-3, not 0.001
    if default == "()" or default[0] == '"':
        default = default[1:-1]
    return Option(node.target.id, default, choices, comment)
