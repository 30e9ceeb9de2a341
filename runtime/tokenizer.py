"""Text to token ids and back, through tiktoken: GPT-2's merges, or plain bytes."""
import numpy as np
import tiktoken

from runtime.config import BadInput

END_OF_TEXT = "<|endoftext|>"


class Tokenizer:
    """name; n_vocab, the number of ids; eos, the id that ends a document and a completion; pad, the id in cells that no
    loss looks at (masks come from lengths, so it may be eos)."""

    def __init__(self, name):
        self.name = name
        self.encoding = {"gpt2": load_gpt2, "bytes": load_bytes}[name]()
        self.n_vocab = self.encoding.n_vocab
        self.eos = self.pad = self.encoding.eot_token

    def encode(self, text):
        """Token ids as a uint32 array. Special tokens written out in the text are ordinary text."""
        return self.encoding.encode_to_numpy(text, disallowed_special=())

    def decode(self, ids):
        return self.encoding.decode([int(i) for i in np.asarray(ids).ravel()])

    def describe(self):
        """What a run folder says of its tokenizer."""
        return {"name": self.name, "n_vocab": self.n_vocab, "eos": self.eos, "stop": [self.eos], "pad": self.pad}


def load_gpt2():
    try:
        return tiktoken.get_encoding("gpt2")
    except Exception as e:
        raise BadInput(f"GPT-2's tokenizer could not be downloaded ({type(e).__name__}): set TIKTOKEN_CACHE_DIR to a folder "
                       "that holds tiktoken's files, or use --tokenizer=bytes.") from None


def load_bytes():
    return tiktoken.Encoding("bytes", pat_str=r"[\s\S]{1,256}", mergeable_ranks={bytes([i]): i for i in range(256)},
                             special_tokens={END_OF_TEXT: 256})
