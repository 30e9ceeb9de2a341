"""Chat templates, rendered by jinja2 as transformers does. A template is a program of others: it runs in a
sandbox, within bounds of time and length."""
import datetime
import functools
import json
import re
import signal
import threading
import time

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

LONGEST = 2**17                      # characters of a template, and of its output beyond twice the texts
SECONDS = 0.4                        # processor time of a rendering
DATE = datetime.datetime(2024, 7, 26)          # Llama 3's default; today's would change ids every day
MARK = "\udc00"                      # between the letters of a control token that a text spells
ROLES = ("system", "user", "assistant")
ASKED = [{"role": "user", "content": "a"}]
ANSWER = "\U000F0000"                # a letter that no template has
ANSWERED = [*ASKED, {"role": "assistant", "content": ANSWER}]


def refuse(message, *_):
    raise jinja2.TemplateError(message)


def check_time(end, *_):
    if time.thread_time() > end:
        raise TimeoutError(f"it takes longer than {SECONDS} seconds")


class Environment(ImmutableSandboxedEnvironment):
    def is_safe_attribute(self, obj, attr, value):
        padding = ("center", "ljust", "rjust", "zfill", "expandtabs", "format", "format_map")
        return attr not in padding and super().is_safe_attribute(obj, attr, value)


@functools.lru_cache
def compiled(text):
    if len(text) > LONGEST:
        raise ValueError(f"it has more than {LONGEST:,} characters")
    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    # A single product or power could fill the memory.
    environment.intercepted_binops = frozenset(("*", "**"))
    environment.binop_table = dict.fromkeys(("*", "**"), functools.partial(refuse, "products are refused"))
    for name in ("center", "indent", "format"):              # so could these
        environment.filters[name] = functools.partial(refuse, f"{name} is refused")
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals |= {"raise_exception": refuse, "strftime_now": DATE.strftime}
    # transformers' trainers read which part of a text is within {% generation %}
    text = re.sub(r"(\{%[-+]?\s*)generation\b", r"\1if true", text)
    return environment.from_string(re.sub(r"(\{%[-+]?\s*)endgeneration\b", r"\1endif", text))


def without_blanks(text):
    return "".join(text.split())


class ChatTemplate:
    """A model's chat template.

    names: {"bos_token": its text, ...}. added: the tokenizer's {id: AddedToken}. Control tokens, {text: id},
    are the special ones, and of the others those around messages that are neither words nor blanks.
    end: the one behind an answer. ValueError for a template that begins an answer otherwise than it asks for
    it, or ends it without a control token.
    """

    def __init__(self, text, names, added):
        self.text = text
        self.names = names
        around = self.fill([*ANSWERED, *ASKED], False)
        tokens = {token.content.strip(): (i, token) for i, token in added.items() if token.special
                  or token.content in around and re.search(r"[^\w\s]", token.content)}
        tokens.pop("", None)
        self.control = {text: i for text, (i, _) in tokens.items()}
        spellings = [r"\s*" * token.lstrip + re.escape(text) + r"\s*" * token.rstrip
                     for text, (_, token) in sorted(tokens.items(), reverse=True)]       # longest first
        self.pattern = re.compile(f"({'|'.join(spellings)})")
        answered = self.render(ANSWERED)
        end = self.pattern.search(answered, answered.find(ANSWER))
        if not answered.startswith(self.render(ASKED, True)) or not end:
            raise ValueError("the chat template begins an answer otherwise than it asks for it, or ends it "
                             "without a special token")
        self.end = end[0].strip()

    def fill(self, messages, add_generation_prompt):
        """Return the template's text. ValueError with the template's reason, if it has one."""
        is_main = threading.current_thread() is threading.main_thread()      # where signals arrive
        if is_main:
            end = time.thread_time() + SECONDS
            former = signal.signal(signal.SIGPROF, functools.partial(check_time, end))
            signal.setitimer(signal.ITIMER_PROF, 0.05, 0.05)
        try:
            text = compiled(self.text).render(messages=messages, tools=None, documents=None, **self.names,
                                              add_generation_prompt=add_generation_prompt)
            if len(text) > LONGEST + 2 * sum(len(message["content"]) for message in messages):
                raise ValueError(f"it writes {len(text):,} characters")
        except Exception as e:
            reason = " ".join(f"{type(e).__name__}: {e}".split())[:200]
            raise ValueError(f"the chat template stops ({reason})") from None
        finally:
            if is_main:
                signal.setitimer(signal.ITIMER_PROF, 0)
                signal.signal(signal.SIGPROF, former or signal.SIG_IGN)      # the default ends the process
        return text

    def render(self, messages, add_generation_prompt=False):
        """Return the template's text. Control tokens in it are the template's: those that a message spells
        have a MARK. ValueError also if a message other than an answer does not appear in it."""
        marked = []
        for role, content in ((message["role"], message["content"]) for message in messages):
            content.encode()                 # ValueError for a lone surrogate, such as MARK
            if role not in ROLES and any(role in token or token in role for token in self.control):
                raise ValueError(f"the role {role!r} is part of a control token")
            content = self.pattern.sub(lambda match: MARK.join(match[0]), content)
            marked.append({"role": role, "content": content})
        text = self.fill(marked, add_generation_prompt)
        shown = without_blanks(text)
        for message in marked:
            if message["role"] != "assistant" and without_blanks(message["content"]) not in shown:
                raise ValueError(f"the chat template omits or changes the text of the role {message['role']}")
        return text

    def ids(self, text, encode):
        """Return the ids of a rendered text."""
        ids = []
        for i, part in enumerate(self.pattern.split(text)):
            ids += [self.control[part.strip()]] if i % 2 else encode(part.replace(MARK, "")).tolist()
        return ids

    def reply(self, text):
        """Return the rendered text from the end of an answer to the next answer, after a user's text."""
        whole = self.render([*ANSWERED, {"role": "user", "content": text}], True)
        return whole[whole.index(self.end, whole.index(ANSWER)):]

    def parts(self, messages):
        """Return [(part of the rendered text, whether it is an answer to train on, with its end)]."""
        whole = self.render(messages)
        parts = []
        start = 0
        for i, message in enumerate(messages):
            if message["role"] == "assistant" and message.get("weight") != 0:
                prompt = self.render(messages[:i], True)
                ends = (match.end() for match in self.pattern.finditer(whole, len(prompt))
                        if match[0].strip() == self.end)
                answer = whole[len(prompt):next(ends, 0)]
                is_whole = without_blanks(message["content"]) in without_blanks(answer.replace(MARK, ""))
                if not whole.startswith(prompt) or not answer or not is_whole:
                    raise ValueError(f"the chat template changes the answer {message['content'][:40]!r}, or "
                                     'asks for it otherwise; end the row with it, or give it "weight": 0')
                parts += [(whole[start:len(prompt)], False), (answer, True)]
                start = len(prompt + answer)
        return [*parts, (whole[start:], False)]
