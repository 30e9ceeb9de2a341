"""Tokenizers and chat templates: GPT-2's BPE or plain bytes through tiktoken, or the tokenizer.json of a
Hugging Face model through the library tokenizers."""
import contextlib
import functools
import hashlib
import json
import re
import unicodedata
from pathlib import Path

import numpy as np
import tiktoken
from tiktoken_ext.openai_public import r50k_pat_str

from runtime.checkpoint import write_atomically
from runtime.config import BadInput, check_type, read_json, require
from runtime.progress import ProgressLine

END_OF_TEXT = "<|endoftext|>"
FILE = "tokenizer.json"
LONG_TEXT = 2**14                    # characters
HF_SETTINGS = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
# Qwen2's pattern, which splits a text into words
WORDS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
         r"\s*[\r\n]+|\s+(?!\S)|\s+")
# {llama.cpp's name of a split into words: the pre-tokenizers before the byte-level one}
SPLITS = {
    "gpt-2": [],
    "smollm": [{"type": "Digits", "individual_digits": True}],
    "qwen2": [{"type": "Split", "pattern": {"Regex": WORDS}, "behavior": "Isolated", "invert": False}],
}
# Printable ASCII, and each other byte of UTF-8 that planes 0 and 1 of Unicode use
CHARACTERS = ["\t", "\n", "\r", *map(chr, [*range(0x20, 0x7f), *range(0x80, 0xc0), *range(0xc0, 0x800, 0x40),
                                           *range(0x900, 0xd000, 0x1000), 0xd000, 0xe000, 0xf900, 0x1f600])]
PLAIN = {"name": "plain"}
DESCRIBED = {                        # keys and types of Tokenizer.describe()
    "name": str, "n_vocab": int, "eos": int, "stop": list, "pad": int, "bos": int | None, "template": dict,
}
BY_ID = ("generation_config", "config")    # files that name special tokens by id, by precedence
# The chat template of runs that recorded only its default system message
CHATML = ("{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
          "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")


class Tokenizer:
    """Encodes and decodes text, and adds the control ids of prompts and answers.

    name      valid in file names
    n_vocab   highest id plus one
    eos       id that ends a document
    end       id that ends an answer: eos, or the first control token behind an answer in the chat template
    stop      ids that end a completion, including eos and end
    pad       id at padded positions; may be eos, since masks come from lengths
    bos       first id of a prompt, or None
    template  {"name": "plain"} or {"name": "jinja", "text": the chat template}
    chat      its ChatTemplate, or None

    Text is never encoded to one of these ids, nor to others around a user's message in the chat template.
    Other added tokens that the tokenizer.json does not mark as special (Qwen3's <think>, runs of blanks) are
    ordinary vocabulary.
    """

    def __init__(self, name, about=None):
        """Load a tokenizer; BadInput if that fails. name: gpt2, bytes, or the path of a tokenizer.json or its
        folder. about: a saved describe(); None: read the files beside the tokenizer.json."""
        with usable(f"The tokenizer {name}"):
            self.read(name, about)

    def read(self, name, about):
        if name in BUILT_IN:
            self.encoding = BUILT_IN[name]()
            eos = self.encoding.eot_token
            about = about or {"eos": eos, "stop": [eos], "pad": eos, "template": PLAIN}
        else:
            self.encoding = TokenizerJson(locate(name))
            about = about or settings(self.encoding)
        self.name = self.encoding.name
        self.n_vocab = self.encoding.n_vocab
        self.eos = about["eos"]
        self.stop = about["stop"]
        self.pad = about["pad"]
        self.bos = about.get("bos")
        self.template = about["template"]
        self.template_error = None           # why the chat template can't be used, which a text does not need
        self.end = self.eos
        if self.template["name"] == "chatml":
            self.template = {"name": "jinja", "text": chatml(self.template["system"], self.bos)}
        if name not in BUILT_IN:
            self.encoding.keep_out_of_text({self.eos, self.pad, self.bos, *self.stop} - {None})
            if self.is_chat:
                try:
                    with usable(f"The chat template in {self.encoding.path.parent}"):
                        self.read_template()
                except BadInput as e:
                    self.template_error = e
            self.encoding.check_pieces()
            self.encoding.check_characters()

    def read_template(self):
        from text.chat import ChatTemplate
        ids = {"eos_token": self.eos} | ({} if self.bos is None else {"bos_token": self.bos})
        names = {name: self.encoding.hf.id_to_token(i) for name, i in ids.items()}
        added = self.encoding.hf.get_added_tokens_decoder()
        self.chat_template = ChatTemplate(self.template["text"], names, added)
        self.encoding.keep_out_of_text({*self.chat_template.control.values()})
        self.end = self.chat.control[self.chat.end]
        self.stop = list(dict.fromkeys([*self.stop, self.end]))
        self.prompt_ids("a")                 # raises for a lone surrogate

    @property
    def chat(self):
        """The ChatTemplate; BadInput if the model's can't be used."""
        if self.template_error:
            raise self.template_error
        return self.chat_template

    @classmethod
    def of_run(cls, folder, about):
        """Return the tokenizer saved in a run folder. about: its describe(). BadInput if the two differ."""
        path = Path(folder) / "model.json"
        ids = check_described(about, path)
        tokenizer = cls(Path(folder) / FILE if about["name"] == FILE else about["name"], about)
        if tokenizer.n_vocab != about["n_vocab"]:
            raise BadInput(f"{FILE} in {folder} has {tokenizer.n_vocab} ids, and the run was made with "
                           f"{about['n_vocab']}: restore the run's own file.")
        if max(ids) >= tokenizer.n_vocab:
            raise BadInput(f"{path} names the token id {max(ids)}, and its tokenizer ends at "
                           f"{tokenizer.n_vocab - 1}: restore it.")
        return tokenizer

    def describe(self):
        """Return the description of the tokenizer for a run folder's model.json."""
        return {
            "name": self.name if self.name in BUILT_IN else FILE,
            "n_vocab": self.n_vocab,
            "eos": self.eos,
            "stop": self.stop,
            "pad": self.pad,
            "bos": self.bos,
            "template": self.template,
        }

    @property
    def option(self):
        """The value of --tokenizer that loads it again: its name, or the absolute path of its file."""
        return self.name if self.name in BUILT_IN else str(self.encoding.path.resolve())

    @property
    def sha256(self):
        """SHA-256 of the tokenizer.json, None without one."""
        return None if self.name in BUILT_IN else hashlib.sha256(self.encoding.content).hexdigest()

    def vocabulary(self):
        """Return {token: id}, bytes in byte_letters, as a tokenizer.json has it."""
        if self.name not in BUILT_IN:
            return self.encoding.hf.get_vocab()
        return ids_of(self.encoding) | {END_OF_TEXT: self.encoding.eot_token}

    def is_file_of(self, name):
        """Return whether `name` is a path of the same tokenizer.json, as when a command is repeated."""
        return name not in BUILT_IN and self.sha256 is not None and Tokenizer(name).sha256 == self.sha256

    def save(self, folder):
        """Write the tokenizer.json, if there is one, into a run folder."""
        if self.name not in BUILT_IN:
            write_atomically(Path(folder) / FILE, self.encoding.content)

    def export(self, folder):
        """Write a tokenizer.json and tokenizer_config.json that give transformers the same ids.

        With split_special_tokens, transformers also encodes the text <|endoftext|> as text; the library
        tokenizers has no such setting and encodes it as the end of text.
        """
        built_in = self.name in BUILT_IN
        config = {}
        for key, i in (("eos_token", self.eos), ("pad_token", self.pad), ("bos_token", self.bos)):
            if i is not None:
                config[key] = self.encoding.decode([i]) if built_in else self.encoding.hf.id_to_token(i)
        if self.is_chat:
            config["chat_template"] = self.template["text"]
        if built_in:
            write_atomically(Path(folder) / FILE, json.dumps(tokenizer_json(self.encoding)).encode())
            config["split_special_tokens"] = True
        self.save(folder)
        config |= HF_SETTINGS
        write_atomically(Path(folder) / "tokenizer_config.json", json.dumps(config, indent=1).encode())

    def encode(self, text):
        """Return token ids as a uint32 array. Special tokens spelled in the text are ordinary text."""
        return self.encoding.encode_to_numpy(text, disallowed_special=())

    def decode(self, ids):
        """Return the text of ids, without ids of a padded vocabulary past n_vocab."""
        return self.encoding.decode([int(i) for i in np.asarray(ids).ravel() if i < self.n_vocab])

    def text_of(self, ids):
        """Return the text of a sampled completion, without its stop token."""
        return self.decode(ids[:-1] if ids and ids[-1] in self.stop else ids)

    @property
    def is_chat(self):
        return self.template["name"] != "plain"

    def prompt_ids(self, text, system=None, examples=()):
        """Return the list of ids of a prompt. system: system message, None: the template's, "": none.
        examples: preceding turns (user's text, assistant's text)."""
        bos = [] if self.bos is None else [self.bos]
        if not self.is_chat:
            if system or examples:
                raise BadInput("The model has no chat template for a system message or earlier "
                               "turns: leave them out, or put them into the prompt.")
            return bos + self.encode(text).tolist() or [self.eos]
        messages = [] if system is None else [{"role": "system", "content": system or "a"}]
        for pair in (*examples, (text,)):
            messages += [{"role": role, "content": said} for role, said in zip(("user", "assistant"), pair)]
        as_used = ["The prompt"]
        if system:
            as_used = ["The system message", "write its text into the question"]
        with usable(*as_used):
            prompt = self.chat.render(messages, True)
            if system != "":
                return self.chat.ids(prompt, self.encode)
            head = self.chat.render(messages[:1])             # a system message in place of the template's
            if not prompt.startswith(head):
                raise ValueError("the chat template writes a system message in any case")
            return bos + self.chat.ids(prompt[len(head):], self.encode)

    def answer_ids(self, text):
        """Return the list of ids of an answer, with its end."""
        return self.encode(text).tolist() + [self.end]

    def reply_ids(self, text, ended):
        """Return the ids that continue an answer with an environment's text: in a chat a user's turn and the
        header of the next answer. ended: whether the answer ended with a stop token."""
        if not self.is_chat:
            return self.encode(text).tolist()
        with usable("The prompt"):
            return self.chat.ids(self.chat.reply(text), self.encode)[ended:]

    def conversation(self, messages):
        """Return [(ids, is_target)] of a conversation. ValueError without a chat template."""
        if not self.is_chat:
            raise ValueError("messages need a model with a chat template, and this one has none; give prompt "
                             "and completion")
        return [(self.chat.ids(text, self.encode), is_target)
                for text, is_target in self.chat.parts(messages)]


def check_described(about, path):
    """Return the ids in a saved describe(); BadInput if malformed."""
    check_type(about, dict, f"{path}: tokenizer")
    for key, hint in DESCRIBED.items():
        check_type(about.get(key), hint, f"{path}: tokenizer: {key}")
    ids = [about["eos"], about["pad"], *about["stop"], about.get("bos") or 0]
    template = about["template"]
    if about["name"] == FILE:
        is_chatml = template.get("name") == "chatml" and isinstance(template.get("system"), str | None)
        is_jinja = template.get("name") == "jinja" and isinstance(template.get("text"), str)
        known = is_chatml or is_jinja or template == PLAIN
    else:
        known = template == PLAIN and about["name"] in BUILT_IN
    if not known or not all(type(i) is int and 0 <= i < 2**31 for i in ids):
        raise BadInput(f"{path} describes an unknown tokenizer ({about['name']}): restore that file.")
    return ids


def chatml(system, bos):
    """Return the chat template of a run's {"name": "chatml", "system": ...}. bos: an id or None."""
    text = CHATML
    if system:
        default = repr(f"<|im_start|>system\n{system}<|im_end|>\n")
        text = "{% if messages[0].role != 'system' %}{{ " + default + " }}{% endif %}" + text
    return text if bos is None else "{{ bos_token }}" + text


# --- tiktoken ---

def load_gpt2():
    try:
        with ProgressLine("downloading GPT-2's tokenizer"):
            return tiktoken.get_encoding("gpt2")
    except Exception as e:
        raise BadInput(f"GPT-2's tokenizer could not be downloaded ({type(e).__name__}): set "
                       "TIKTOKEN_CACHE_DIR to a folder that holds tiktoken's files, or use "
                       "--tokenizer=bytes.") from None


def load_bytes():
    ranks = {bytes([i]): i for i in range(256)}
    return tiktoken.Encoding("bytes", pat_str=r"[\s\S]{1,256}", mergeable_ranks=ranks,
                             special_tokens={END_OF_TEXT: 256})


BUILT_IN = {"gpt2": load_gpt2, "bytes": load_bytes}


def byte_letters():
    """Return the 256 characters of byte-level vocabularies: printable bytes, else from U+0100."""
    prints = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in prints else next(others)) for byte in range(256)]


def byte_level(vocab, merges, end, split="gpt-2"):
    """Return the tokenizer.json of byte-level BPE as a dictionary. vocab: {token in byte_letters: id};
    merges: [[left, right]] in order; end: id of the end of text; split: a name in SPLITS."""
    is_qwen2 = split == "qwen2"
    last = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": not is_qwen2}
    steps = {"type": "Sequence", "pretokenizers": [*SPLITS[split], last]}
    special = {"id": end, "content": END_OF_TEXT, "special": True}
    special |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "added_tokens": [special],
        "normalizer": {"type": "NFC"} if is_qwen2 else None,
        "pre_tokenizer": steps if SPLITS[split] else last,
        "post_processor": None,
        "decoder": last,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }


def tokenizer_json(encoding):
    """Return the tokenizer.json of a built-in tokenizer as a dictionary. tiktoken does not keep the merges: a
    token's merge joins the last two parts that remain when its bytes are merged by rank."""
    ranks = encoding._mergeable_ranks
    letters = byte_letters()
    merges = []
    for token in sorted(ranks, key=ranks.get):
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            pairs = [left + right for left, right in zip(parts, parts[1:])]
            _, i = min((ranks.get(pair, len(ranks)), i) for i, pair in enumerate(pairs))
            parts[i:i + 2] = [pairs[i]]
        if len(parts) == 2:
            merges.append([in_letters(part, letters) for part in parts])
    return byte_level(ids_of(encoding), merges, encoding.eot_token)


def ids_of(encoding):
    """Return {token in byte_letters: id} of a built-in tokenizer, without the end of text."""
    letters = byte_letters()
    return {in_letters(token, letters): rank for token, rank in encoding._mergeable_ranks.items()}


def split_of(about):
    """Return the name in SPLITS of the split of a tokenizer.json (a dict) of byte-level BPE, else None."""
    unlike = ("continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges")
    if about["model"].get("type") != "BPE" or any(map(about["model"].get, unlike)):
        return None
    expected = {name: byte_level({}, [], 0, name) for name in SPLITS}
    return next((name for name, other in expected.items() if pre_tokenizers(other) == pre_tokenizers(about)
                 and other["normalizer"] == about.get("normalizer")), None)


def pre_tokenizers(about):
    """Return the list of pre-tokenizers, with the library's default and without a key that changes no id."""
    whole = about.get("pre_tokenizer") or {}
    steps = whole.get("pretokenizers", [whole])
    return [{"use_regex": True} | step | {"trim_offsets": None} for step in steps]


def as_tiktoken(content):
    """Return a tiktoken.Encoding that gives text the ids of a tokenizer.json, in a fraction of the library's
    time; None unless it is byte-level BPE with GPT-2's split."""
    about = json.loads(content)
    model = about["model"]
    if split_of(about) != "gpt-2" or not all(token["special"] for token in about.get("added_tokens", [])):
        return None
    vocab = model["vocab"]
    byte_of = {letter: byte for byte, letter in enumerate(byte_letters())}
    merged = ["".join(pair if isinstance(pair, list) else pair.split(" ")) for pair in model["merges"]]
    ids = [vocab[token] for token in merged]
    bytes_alone = byte_of.keys() <= vocab.keys() and {*"".join(merged)} <= byte_of.keys()
    if ids != sorted(set(ids)) or not bytes_alone:
        return None
    ranks = {bytes(map(byte_of.get, token)): vocab[token] for token in [*byte_of, *merged]}
    return tiktoken.Encoding(FILE, pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={})


def in_letters(token, letters):
    return "".join(letters[byte] for byte in token)


# --- Hugging Face's files ---

@contextlib.contextmanager
def usable(name, advice="correct it, or choose another"):
    """Raise BadInput for any exception from reading or using a tokenizer's files."""
    try:
        yield
    except (BadInput, KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as e:               # panics of the library tokenizers are not Exceptions
        reason = " ".join(f"{type(e).__name__}: {e}".split())[:200]
        raise BadInput(f"{name} can't be used ({reason}): {advice}.") from None


class TokenizerJson:
    """A tokenizer.json with the part of tiktoken's interface that Tokenizer uses."""

    def __init__(self, path):
        tokenizers = require("tokenizers", f"{path} can't be read")
        try:
            self.content = path.read_bytes()
            self.hf = tokenizers.Tokenizer.from_buffer(self.content)
        except Exception as e:
            raise BadInput(f"{path} is not a readable tokenizer.json ({getattr(e, 'strerror', None) or e}): "
                           "download it again.") from None
        if getattr(self.hf.model, "dropout", None):
            raise BadInput(f"{path} encodes a text differently each time "
                           f"(dropout={self.hf.model.dropout:.3g}): set dropout to null in that file.")
        self.hf.no_truncation()
        self.hf.no_padding()
        self.hf.encode_special_tokens = True                  # spelled in a text, they are text
        self.path = path
        self.name = f"tokenizer-{hashlib.sha256(self.content).hexdigest()[:8]}"
        self.n_vocab = max(self.hf.get_vocab().values(), default=-1) + 1
        self.id_of = self.hf.token_to_id
        if not self.encode_to_numpy("a\nb").size:
            raise BadInput(f"{path} encodes a text to no tokens: download it again.")

    def __setstate__(self, state):
        self.__dict__ |= state
        self.hf.encode_special_tokens = True                  # lost by pickle and copy

    @functools.cached_property
    def fast(self):
        """The same in tiktoken, or None: built for the first long text, since it takes a third of a second
        with GPT-2's merges."""
        return as_tiktoken(self.content)

    def encode_to_numpy(self, text, disallowed_special=()):
        text.encode()                        # ValueError for a lone surrogate, as in tiktoken
        if len(text) > LONG_TEXT and self.fast:
            return self.fast.encode_to_numpy(text, disallowed_special=())
        with usable(self.path):
            # The library's only call that releases the GIL and does not compute character offsets.
            ids = self.hf.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return np.array(ids, dtype=np.uint32)

    def decode(self, ids):
        with usable(self.path):
            return self.hf.decode(ids, skip_special_tokens=False)

    def bos(self):
        """Return the id that the post-processor (such as Llama 3's) puts before a text, or None."""
        bare = self.hf.encode("a", add_special_tokens=False).ids
        whole = self.hf.encode("a", add_special_tokens=True).ids
        is_known = whole and whole[0] < self.n_vocab
        return whole[0] if is_known and whole[1:1 + len(bare)] == bare else None

    def keep_out_of_text(self, ids):
        """Ensure that no text is encoded to one of these ids, special in the file or not."""
        tokens = {i: token for i in ids if (token := self.hf.id_to_token(i)) is not None}
        added = self.hf.get_added_tokens_decoder()       # adding again would lose their lstrip and rstrip
        self.hf.add_special_tokens([token for i, token in tokens.items()
                                    if not (i in added and added[i].special)])
        for i, token in tokens.items():
            if i in self.encode_to_numpy(token):
                raise BadInput(f"{self.path} encodes the text {token} to the id {i} of a control token: "
                               "correct eos_token_id, bos_token_id and pad_token_id in config.json and "
                               "generation_config.json, or choose a byte-level tokenizer.")

    def check_pieces(self):
        """Raise BadInput if pieces of a text are encoded differently (as by Llama 2's tokenizer)."""
        pieces = [*self.encode_to_numpy("a\n"), *self.encode_to_numpy("b")]
        if self.encode_to_numpy("a\nb").tolist() != pieces:
            raise BadInput(f"{self.path} encodes a piece of a text differently than the whole text: choose a "
                           "byte-level tokenizer, such as GPT-2's, Llama 3's or Qwen's.")

    def check_characters(self):
        """Raise BadInput if characters of written text are lost. SmolLM2 loses some control characters."""
        lost = [c for c in CHARACTERS if unicodedata.normalize("NFKC", self.decode(self.encode_to_numpy(c)))
                != unicodedata.normalize("NFKC", c)]
        if lost:
            raise BadInput(f"{self.path} has no ids for {lost[0]!r} and {len(lost) - 1} other characters of "
                           f"{len(CHARACTERS)}, which a text would lose: choose a byte-level tokenizer whose "
                           "vocabulary has all bytes.")


def locate(name):
    """Return the path of the tokenizer.json that `name`, a file or a folder, refers to."""
    path = Path(name)
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        missing = f"The folder {path} has no {FILE}" if path.is_dir() else f"There is no tokenizer {path}"
        raise BadInput(f"{missing}: choose --tokenizer=gpt2, bytes, or the path of a {FILE} or its folder.")
    return file


def settings(encoding):
    """Return {eos, stop, pad, bos, template} from the files beside a tokenizer.json."""
    folder = encoding.path.parent
    files = {}
    for name in ("tokenizer_config", "special_tokens_map", "generation_config", "config"):
        file = folder / f"{name}.json"
        files[name] = read_json(file, "download it again") if file.exists() else {}
    eos = special_id("eos", encoding, files)
    pad = special_id("pad", encoding, files)
    if eos is None:
        raise BadInput(f"{folder} does not say which token ends a text: name it as eos_token in its "
                       "tokenizer_config.json.")
    named = [known_ids(files[name].get("eos_token_id"), encoding.n_vocab) for name in BY_ID]
    stop = [eos, *(named[0] or named[1])]
    with usable(f"The chat template in {folder}"):
        template = chat_template(folder, files["tokenizer_config"])
    bos = encoding.bos()
    if template:
        bos = special_id("bos", encoding, files) if "bos_token" in template else None
    return {
        "eos": eos,
        "stop": list(dict.fromkeys(stop)),               # without duplicates
        "pad": eos if pad is None else pad,
        "bos": bos,
        "template": {"name": "jinja", "text": template} if template else PLAIN,
    }


def special_id(key, encoding, files):
    """Return the id of the "eos", "pad" or "bos" token or None; names precede ids."""
    for name in ("tokenizer_config", "special_tokens_map"):
        token = files[name].get(f"{key}_token")
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str) and encoding.id_of(token) is not None:
            return encoding.id_of(token)
    for name in BY_ID:
        ids = known_ids(files[name].get(f"{key}_token_id"), encoding.n_vocab)
        if ids:
            return ids[0]
    return None


def known_ids(value, n_vocab):
    """Return the valid ids in a value, which may be an id, a list, or neither."""
    values = value if isinstance(value, list) else [value]
    return [i for i in values if type(i) is int and 0 <= i < n_vocab]


def chat_template(folder, tokenizer_config):
    """Return the text of the chat template, "" if there is none. It is a separate file, or in older models
    one or several templates in the config."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8")
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        template = {named["name"]: named["template"] for named in template}
    if isinstance(template, dict):
        template = template.get("default")
    if not isinstance(template, str | None):
        raise ValueError(f"{str(template)[:20]} is no text")
    return template or ""
