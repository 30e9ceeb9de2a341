"""Render chat templates, which are programs of others, in jinja2's sandbox and in a process of its own, whose
time and memory the kernel limits: a sandbox alone does not (three nested lists in `tojson` run for days).

`python -m text.render` is the process. Each line of its standard input is a JSON list [template, [variables
of a text, ...], characters that a text may have]; each line of its output [texts, or null; the reason]."""
import contextlib
import datetime
import functools
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

LONGEST = 2**17                      # characters of a template
SECONDS = 0.4                        # processor time of a rendering
MEMORY = 2**28                       # bytes of address space of the process; it needs 2**25
DATE = datetime.datetime(2024, 7, 26)          # Llama 3's default; today's would change ids every day
LOCK = threading.Lock()
PROCESSES = {}                       # {pid: its rendering process}: a fork needs its own


@functools.lru_cache
def compiled(text):
    """Return the jinja2 template. transformers' settings, filters and functions."""
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    if len(text) > LONGEST:
        raise ValueError(f"it has more than {LONGEST:,} characters")

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": DATE.strftime}
    # transformers' trainers read which part of a text is within {% generation %}
    text = re.sub(r"(\{%[-+]?\s*)generation\b", r"\1if true", text)
    return environment.from_string(re.sub(r"(\{%[-+]?\s*)endgeneration\b", r"\1endif", text))


def texts(template, all_variables, longest):
    """Return [texts, None] or [None, the reason]."""
    try:
        texts = [compiled(template).render(variables) for variables in all_variables]
        most = max(map(len, texts))
        return [texts, None] if most <= longest else [None, f"it writes {most:,} characters"]
    except MemoryError:
        return [None, f"MemoryError: it takes more than {MEMORY / 2**20:g} MiB"]
    except Exception as e:
        return [None, " ".join(f"{type(e).__name__}: {e}".split())[:200]]


def main():
    compiled("")                     # the time that jinja2's import takes is not a template's
    with contextlib.suppress(OSError, ValueError):         # macOS refuses a limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for line in sys.stdin:
        template, all_variables, longest = json.loads(line)
        # SIGPROF ends the process, in C code too
        signal.setitimer(signal.ITIMER_PROF, SECONDS * len(all_variables))
        answer = json.dumps(texts(template, all_variables, longest))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(answer, flush=True)


def process():
    """Return this process's own, started at its first text. It ends with its standard input."""
    if os.getpid() not in PROCESSES:
        PROCESSES[os.getpid()] = subprocess.Popen(
            [sys.executable, "-m", "text.render"], cwd=Path(__file__).parent.parent, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            start_new_session=True)              # Ctrl-C is not for it
    return PROCESSES[os.getpid()]


def render(template, all_variables, longest):
    """Return the template's texts, each of at most `longest` characters, else ValueError with the reason.
    One call for several texts: a call takes 0.2 ms, of which the pipes take half."""
    with LOCK:
        worker = process()
        try:
            worker.stdin.write(json.dumps([template, all_variables, longest]) + "\n")
            worker.stdin.flush()
            answer = worker.stdout.readline()
        except BrokenPipeError:
            answer = ""
        except BaseException:                # Ctrl-C: the next text would get this one's answer
            end()
            raise
        if not answer:
            end()
    if not answer:
        raise ValueError(f"TimeoutError: it takes longer than {SECONDS} seconds"
                         if worker.returncode == -signal.SIGPROF else f"it ends Python ({worker.returncode})")
    texts, reason = json.loads(answer)
    if reason:
        raise ValueError(reason)
    return texts


def end():
    """End the process, if there is one; the next text starts another."""
    if worker := PROCESSES.pop(os.getpid(), None):
        with contextlib.suppress(BrokenPipeError), worker:       # closes the pipes and waits
            pass


if __name__ == "__main__":
    main()
