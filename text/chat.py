"""Chat templates: the ids of a conversation, and which of them are trained on."""
import re

from text.render import LONGEST, render

MARK = "\udc00"                      # between the letters of a control token that a text spells
ROLES = ("system", "user", "assistant")
ASKED = [{"role": "user", "content": "a"}]
ANSWER = "\U000F0000"                # a letter that no template has
ANSWERED = [*ASKED, {"role": "assistant", "content": ANSWER}]


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
        around, = self.fill([([*ANSWERED, *ASKED], False)])
        tokens = {token.content.strip(): (i, token) for i, token in added.items() if token.special
                  or token.content in around and re.search(r"[^\w\s]", token.content)}
        tokens.pop("", None)
        self.control = {text: i for text, (i, _) in tokens.items()}
        spellings = [r"\s*" * token.lstrip + re.escape(text) + r"\s*" * token.rstrip
                     for text, (_, token) in sorted(tokens.items(), reverse=True)]       # longest first
        self.pattern = re.compile(f"({'|'.join(spellings)})")
        answered, asked = self.renders([(ANSWERED, False), (ASKED, True)])
        end = self.pattern.search(answered, answered.find(ANSWER))
        if not answered.startswith(asked) or not end:
            raise ValueError("the chat template begins an answer otherwise than it asks for it, or ends it "
                             "without a special token")
        self.end = end[0].strip()

    def fill(self, conversations):
        """Return the template's texts of [(messages, add_generation_prompt)]. ValueError with the template's
        reason, if it has one."""
        variables = [{"messages": messages, "tools": None, "documents": None, **self.names,
                      "add_generation_prompt": asks} for messages, asks in conversations]
        letters = max(sum(len(message["content"]) for message in messages) for messages, _ in conversations)
        try:
            return render(self.text, variables, LONGEST + 2 * letters)
        except ValueError as e:
            raise ValueError(f"the chat template stops ({e})") from None

    def marked(self, messages):
        """Return messages in which the control tokens that they spell have a MARK."""
        marked = []
        for role, content in ((message["role"], message["content"]) for message in messages):
            content.encode()                 # ValueError for a lone surrogate, such as MARK
            if role not in ROLES and any(role in token or token in role for token in self.control):
                raise ValueError(f"the role {role!r} is part of a control token")
            content = self.pattern.sub(lambda match: MARK.join(match[0]), content)
            marked.append({"role": role, "content": content})
        return marked

    def render(self, messages, add_generation_prompt=False):
        """Return the template's text. Control tokens in it are the template's. ValueError also if a message
        other than an answer does not appear in it."""
        return self.renders([(messages, add_generation_prompt)])[0]

    def renders(self, conversations):
        conversations = [(self.marked(messages), asks) for messages, asks in conversations]
        texts = self.fill(conversations)
        for text, (messages, _) in zip(texts, conversations):
            shown = without_blanks(text)
            for message in messages:
                if message["role"] != "assistant" and without_blanks(message["content"]) not in shown:
                    raise ValueError("the chat template omits or changes the text of the role "
                                     f"{message['role']}")
        return texts

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
        answers = [i for i, message in enumerate(messages)
                   if message["role"] == "assistant" and message.get("weight") != 0]
        whole, *prompts = self.renders([(messages, False), *((messages[:i], True) for i in answers)])
        parts = []
        start = 0
        for i, prompt in zip(answers, prompts):
            content = messages[i]["content"]
            ends = (match.end() for match in self.pattern.finditer(whole, len(prompt))
                    if match[0].strip() == self.end)
            answer = whole[len(prompt):next(ends, 0)]
            is_whole = without_blanks(content) in without_blanks(answer.replace(MARK, ""))
            if not whole.startswith(prompt) or not answer or not is_whole:
                raise ValueError(f"the chat template changes the answer {content[:40]!r}, or asks for it "
                                 'otherwise; end the row with it, or give it "weight": 0')
            parts += [(whole[start:len(prompt)], False), (answer, True)]
            start = len(prompt + answer)
        return [*parts, (whole[start:], False)]
