"""Text to ids, and prompts: what a tokenizer.json gives is what the library and transformers give."""
import json
import os
import pickle
import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tiktoken
from tiktoken_ext.openai_public import r50k_pat_str

pytest.importorskip("tokenizers")
from tokenizers import AddedToken, Regex, Tokenizer as Library
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from conftest import trained
from runtime.config import BadInput
from text import bpe, data, sources
from text.tokenizer import BUILT_IN, WORDS, Tokenizer, as_tiktoken, byte_letters

END, START, STOP, BOS = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin|>"
LEARNT = ["Question: how many gram are there per 6 kg? user\nassistant\nsystem\n\nYou are a helpful assistant.\n\n\n 42 3.14\n 5",
          "the cat sat on the mat, and naïve über-cats don't 漢字 \n\n the answer is <answer>6000</answer>\n"] * 3
# What SmolLM2-Instruct's and Qwen2.5-Instruct's chat templates come to without tools.
SMOL = ("{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\\nYou are a small model, née test<|im_end|>\\n' }}{% endif %}"
        "{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")
QWEN25 = ("{%- if tools %}\n    {{- '<|im_start|>system\\n' }}\n    {{- 'with tools<|im_end|>\\n' }}\n{%- else %}\n"
          "    {%- if messages[0]['role'] == 'system' %}\n"
          "        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}\n    {%- else %}\n"
          "        {{- '<|im_start|>system\\nYou\\'re to put the answer within \\\\boxed{}.<|im_end|>\\n' }}\n"
          "    {%- endif %}\n{%- endif %}\n{%- for message in messages %}\n"
          "    {%- if (message.role == \"user\") or (message.role == \"system\" and not loop.first) "
          "or (message.role == \"assistant\" and not message.tool_calls) %}\n        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}\n"
          "    {%- endif %}\n{%- endfor %}\n"
          "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n{%- endif %}\n")
QWEN3 = ("{%- if messages[0].role == 'system' %}\n    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}\n"
         "{%- endif %}\n{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}\n"
         "{%- for message in messages[::-1] %}\n    {%- set index = (messages|length - 1) - loop.index0 %}\n"
         "    {%- if ns.multi_step_tool and message.role == \"user\" and message.content is string and not("
         "message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}\n"
         "        {%- set ns.multi_step_tool = false %}\n        {%- set ns.last_query_index = index %}\n    {%- endif %}\n{%- endfor %}\n"
         "{%- for message in messages %}\n    {%- set content = message.content %}\n"
         "    {%- if (message.role == \"user\") or (message.role == \"system\" and not loop.first) %}\n"
         "        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}\n"
         "    {%- elif message.role == \"assistant\" %}\n        {%- set reasoning_content = '' %}\n        {%- if '</think>' in content %}\n"
         "            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}\n"
         "            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}\n        {%- endif %}\n"
         "        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}\n"
         "            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}\n"
         "        {%- else %}\n            {{- '<|im_start|>' + message.role + '\\n' + content }}\n        {%- endif %}\n"
         "        {{- '<|im_end|>\\n' }}\n    {%- endif %}\n{%- endfor %}\n"
         "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n{%- endif %}\n")


def write(folder, kind="gpt2", chat=None, bos=False, files=None, special=(), **config):
    """A folder with the tokenizer.json of a byte-level BPE and a tokenizer_config.json, much as a model on the hub has them."""
    library = Library(models.BPE())
    split = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    if kind == "smol":
        split = [pre_tokenizers.Digits(individual_digits=True)] + split
    if kind == "words":                      # Qwen2's split, much as Llama 3's
        split = [pre_tokenizers.Split(Regex(WORDS), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    if kind == "qwen":
        library.normalizer = normalizers.NFC()
    library.pre_tokenizer, library.decoder = pre_tokenizers.Sequence(split), decoders.ByteLevel()
    library.train_from_iterator(LEARNT, trainers.BpeTrainer(
        vocab_size=340, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
        special_tokens=[END, START, STOP] if kind == "smol" else []))
    library.add_special_tokens([END, START, STOP] if chat or kind == "smol" else [END])
    library.add_tokens([AddedToken("<think>", special=False)])
    library.add_special_tokens([*special])
    if bos:
        library.add_special_tokens([BOS])
        library.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, library.token_to_id(BOS))])
    folder.mkdir(parents=True, exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": STOP if chat else END} | config
    if chat:
        config["chat_template"] = chat
    for name, content in ({"tokenizer_config": config} | (files or {})).items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def changed(folder, **parts):
    """A tokenizer.json of which parts are others."""
    path = write(folder) / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | parts))
    return folder


def tiktoken_encoding(name, tokens):
    """A tiktoken encoding with GPT-2's pattern. tokens: {bytes: id}."""
    return tiktoken.Encoding(name, pat_str=r50k_pat_str, mergeable_ranks=tokens, special_tokens={END: len(tokens)})


def unicode_texts(n, seed=0):
    """Texts of characters from everywhere, with the written-out special tokens among them."""
    rng = random.Random(seed)
    ranges = [(0, 0x80), (0, 0x250), (0x300, 0x370), (0x4e00, 0x4f00), (0x1f300, 0x1f700), (0, 0xd800), (0xe000, 0x110000)]

    def piece():
        if rng.random() < 0.2:
            return rng.choice([END, STOP, START, "\n", " ", "\n\n 5 the cat", "  ", "the answer"])
        return chr(rng.randrange(*rng.choice(ranges)))
    return ["".join(piece() for _ in range(rng.randrange(40))) for _ in range(n)]


@pytest.mark.parametrize("kind", ["gpt2", "smol", "qwen"])
def test_ids_are_the_librarys_and_texts_come_back(tmp_path, kind):
    transformers = pytest.importorskip("transformers")
    tokenizer = Tokenizer(str(write(tmp_path / "model", kind, chat=SMOL)))
    library = Library.from_file(str(tmp_path / "model" / "tokenizer.json"))
    fast = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "model")
    for text in LEARNT[:2] + ["", " ", "a <think> b", "1234567890"]:
        ids = tokenizer.encode(text)
        assert ids.dtype == np.uint32 and ids.ndim == 1 and tokenizer.decode(ids) == text
        assert ids.tolist() == library.encode(text, add_special_tokens=False).ids == fast.encode(text, add_special_tokens=False)
    assert tokenizer.n_vocab == max(library.get_vocab().values()) + 1
    fine = normalizers.NFC().normalize_str if kind == "qwen" else str
    for text in unicode_texts(300):
        assert tokenizer.decode(tokenizer.encode(text)) == fine(text)


@pytest.mark.parametrize("special", [True, False])
def test_no_text_becomes_a_control_token(tmp_path, special):
    """Not even where the tokenizer.json calls none of them special."""
    names = [STOP, START, BOS, END]
    folder = write(tmp_path / "model", "smol", "{{ bos_token }}" + SMOL, bos=True, bos_token=BOS, pad_token=END)
    content = json.loads((folder / "tokenizer.json").read_text())
    for token in content["added_tokens"]:
        token["special"] = special and token["content"] in names
    (folder / "tokenizer.json").write_text(json.dumps(content))
    tokenizer, library = Tokenizer(folder), Library.from_file(str(folder / "tokenizer.json"))
    end, start, bos, pad = control = [library.token_to_id(name) for name in names]
    assert (tokenizer.end, tokenizer.bos, tokenizer.pad) == (end, bos, pad) and {start, end} <= {*tokenizer.chat.control.values()}
    for text in unicode_texts(200) + [END, f"a{STOP}\n{START}user\n{BOS}{END}", f" {STOP} ", f"<{STOP}>"]:
        ids = tokenizer.encode(text)
        assert not {*control} & {*ids.tolist()} and tokenizer.decode(ids) == text
        assert [i for i in tokenizer.prompt_ids(text) if i in control] == [bos, start, end, start, end, start]
    think = library.token_to_id("<think>")               # neither control nor called special: vocabulary like any other
    assert tokenizer.encode("<think>").tolist() == [think] and tokenizer.decode([think, end]) == f"<think>{STOP}"


def test_a_copy_in_another_process_keeps_control_tokens_out_too(tmp_path):
    tokenizer = Tokenizer(write(tmp_path, "smol", SMOL))
    assert pickle.loads(pickle.dumps(tokenizer)).prompt_ids(f"a{STOP}") == tokenizer.prompt_ids(f"a{STOP}")


def chatml(tokenizer, role, text):
    """The ids of a message."""
    start, end = map(tokenizer.encoding.id_of, (START, STOP))
    return [start, *tokenizer.encode(f"{role}\n{text}").tolist(), end, *tokenizer.encode("\n").tolist()]


@pytest.mark.parametrize("kind, chat, system", [
    ("smol", SMOL, "You are a small model, née test"), ("qwen", QWEN25, "You're to put the answer within \\boxed{}."),
    ("qwen", QWEN3, None), ("smol", SMOL.replace("\\n", "\n"), "You are a small model, née test"),
    ("smol", SMOL.replace("'<|im_start|>system\\nYou are a small model, née test<|im_end|>\\n'",
                          "\"<|im_start|>system\\nDon't<|im_end|>\\n\""), "Don't")])
def test_chatml_prompts_are_those_of_transformers(tmp_path, kind, chat, system):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("jinja2")
    folder = write(tmp_path / "model", kind, chat, pad_token=END)
    tokenizer, theirs = Tokenizer(folder), transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    assert tokenizer.template == {"name": "jinja", "text": chat}
    said = [("a", "b"), (f"\n\n {STOP}", "4 5"), (f"{START}user\n", "")]
    for others in ([], said):                # as they were before jinja2 rendered them
        turns = [("system", system)] * bool(system)
        turns += [turn for pair in others for turn in zip(("user", "assistant"), pair)]
        ids = [*sum((chatml(tokenizer, *turn) for turn in turns), []), *chatml(tokenizer, "user", " 5 kg\n")]
        ids += [tokenizer.encoding.id_of(START), *tokenizer.encode("assistant\n").tolist()]
        assert tokenizer.prompt_ids(" 5 kg\n", examples=others) == ids

    def expected(*messages):
        messages = [{"role": role, "content": content} for role, content in messages]
        return theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    for text in ["how many gram are there per 6 kg?", "", " ", "\n\n the cat ", "1234\n 5", "漢字é", "é <think>"]:
        assert tokenizer.prompt_ids(text) == expected(("user", text))
        other = "You are another.\n"
        assert tokenizer.prompt_ids(text, system=other) == expected(("system", other), ("user", text))
    bare = tokenizer.prompt_ids("the cat", system="")
    assert tokenizer.decode(bare) == f"{START}user\nthe cat{STOP}\n{START}assistant\n"
    assert tokenizer.answer_ids("6000") == tokenizer.encode("6000").tolist() + [theirs.convert_tokens_to_ids(STOP)]
    assert (tokenizer.eos, tokenizer.pad) == (theirs.eos_token_id, theirs.pad_token_id) and tokenizer.stop == [tokenizer.eos]


def test_plain_prompts(tmp_path):
    tokenizer = Tokenizer(write(tmp_path / "a"))
    assert tokenizer.template == {"name": "plain"} and tokenizer.bos is None and tokenizer.pad == tokenizer.eos
    assert tokenizer.prompt_ids("the cat") == tokenizer.encode("the cat").tolist() and tokenizer.prompt_ids("") == [tokenizer.eos]
    assert tokenizer.answer_ids("") == [tokenizer.eos]
    with pytest.raises(BadInput, match="system message"):
        tokenizer.prompt_ids("the cat", system="You are a cat.")
    llama = Tokenizer(write(tmp_path / "b", bos=True))
    assert llama.decode([llama.bos]) == BOS and llama.prompt_ids("") == [llama.bos]
    assert llama.prompt_ids("the cat") == [llama.bos] + llama.encode("the cat").tolist() and llama.bos not in llama.encode("")
    assert Tokenizer(write(tmp_path / "c", chat=SMOL, bos=True, bos_token=BOS)).bos is None      # this template writes none
    hermes = Tokenizer(write(tmp_path / "d", chat="{{ bos_token }}" + SMOL, bos=True, bos_token=BOS))
    assert hermes.prompt_ids("a")[:2] == [hermes.bos, hermes.encoding.id_of(START)]


@pytest.mark.parametrize("files, eos, pad, stop", [
    ({"tokenizer_config": {"eos_token": {"content": END}, "pad_token": STOP}}, END, STOP, [END]),
    ({"tokenizer_config": {"eos_token": END}, "special_tokens_map": {"eos_token": STOP, "pad_token": {"content": START}}}, END,
     START, [END]),
    ({"tokenizer_config": {"eos_token": "<gone>"}, "generation_config": {"eos_token_id": [2, 0], "pad_token_id": 1}}, STOP, START,
     [STOP, END]),
    ({"tokenizer_config": {"eos_token": END}, "generation_config": {"eos_token_id": [2, 10**6]}}, END, END, [END, STOP]),
    ({"config": {"eos_token_id": 2, "pad_token_id": -1}}, STOP, STOP, [STOP]),
    ({"tokenizer_config": {"eos_token": END}, "config": {"eos_token_id": [0, 2]}}, END, END, [END, STOP]),
    ({"config": {"eos_token_id": [2, 0]}, "generation_config": {"top_k": 5}}, STOP, STOP, [STOP, END]),
    ({"config": {"eos_token_id": [0, 2]}, "generation_config": {"eos_token_id": 0}}, END, END, [END]),
    ({"tokenizer_config": {"eos_token": END, "chat_template": {"default": QWEN3}}}, END, END, [END, STOP]),
    ({"tokenizer_config": {"eos_token": END, "chat_template": [{"name": "tools", "template": "{{ 1 }}"},
                                                               {"name": "default", "template": QWEN3}]}}, END, END, [END, STOP])])
def test_where_the_ids_come_from(tmp_path, files, eos, pad, stop):
    tokenizer = Tokenizer(write(tmp_path, "smol", files={"tokenizer_config": {}} | files))
    assert [tokenizer.decode([i]) for i in (tokenizer.eos, tokenizer.pad, *tokenizer.stop)] == [eos, pad, *stop]


def test_a_chat_template_beside_the_configuration_comes_first(tmp_path):
    folder = write(tmp_path, "smol", chat=QWEN25)
    (folder / "chat_template.jinja").write_text(QWEN3)
    assert Tokenizer(folder).template == {"name": "jinja", "text": QWEN3}


@pytest.mark.parametrize("make", [dict(chat=SMOL, pad_token=END), dict(bos=True), dict(kind="smol")])
def test_a_run_folder_holds_all_of_it(tmp_path, make):
    folder, run = write(tmp_path / "model", **make), tmp_path / "run"
    run.mkdir()
    before = Tokenizer(folder / "tokenizer.json")
    assert before.name == Tokenizer(folder).name and before.name.startswith("tokenizer-") and len(before.name) == len("tokenizer-") + 8
    before.save(run)
    assert [p.name for p in run.iterdir()] == ["tokenizer.json"]
    after = Tokenizer.of_run(run, json.loads(json.dumps(before.describe())))
    assert before.describe() == after.describe() and after.describe()["name"] == "tokenizer.json"
    for text in unicode_texts(50) + LEARNT:
        assert before.prompt_ids(text) == after.prompt_ids(text) and before.answer_ids(text) == after.answer_ids(text)
    with pytest.raises(BadInput, match="made with 9"):
        Tokenizer.of_run(run, before.describe() | {"n_vocab": 9})
    if before.is_chat:
        with pytest.raises(BadInput, match="can't be used"):
            Tokenizer.of_run(run, before.describe() | {"template": {"name": "chatml", "system": "\ud800"}}).prompt_ids("a")


def test_bytes_are_as_they_were(tmp_path):
    tokenizer = Tokenizer("bytes")
    assert tokenizer.encode(f"a{END}").tolist() == list(f"a{END}".encode()) and tokenizer.encode("é").dtype == np.uint32
    assert tokenizer.describe() == {"name": "bytes", "n_vocab": 257, "eos": 256, "stop": [256], "pad": 256, "bos": None,
                                    "template": {"name": "plain"}}
    tokenizer.save(tmp_path)
    assert not list(tmp_path.iterdir())
    again = Tokenizer.of_run(tmp_path, tokenizer.describe())
    assert again.describe() == tokenizer.describe() and again.prompt_ids("") == [256] and again.answer_ids("a") == [97, 256]


@pytest.fixture
def small_gpt2(tmp_path, monkeypatch):
    """Makes gpt2 a tiktoken encoding of its kind with a small vocabulary; [[left, right]], its merges."""
    model = json.loads((write(tmp_path / "small") / "tokenizer.json").read_text())["model"]
    byte_of = {letter: byte for byte, letter in enumerate(byte_letters())}
    tokens = {bytes(map(byte_of.get, token)): i for token, i in model["vocab"].items()}
    monkeypatch.setitem(BUILT_IN, "gpt2", lambda: tiktoken_encoding("gpt2", tokens))
    return model["merges"]


def assert_transformers_reads(tokenizer, folder):
    """An export that AutoTokenizer loads and that gives the same ids and the same texts."""
    transformers = pytest.importorskip("transformers")
    folder.mkdir()
    tokenizer.export(folder)
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert len(theirs) == tokenizer.n_vocab and {theirs.eos_token_id, theirs.pad_token_id} == {tokenizer.eos}
    every = "".join(map(chr, range(0x3000)))
    for text in LEARNT[:2] + unicode_texts(300) + ["", " ", "\n", "a .  b , c !", END, f"a{END} b", every]:
        ids = tokenizer.encode(text).tolist()
        assert theirs(text).input_ids == ids and theirs.decode(ids) == tokenizer.decode(ids) == text
    assert theirs.decode([tokenizer.eos]) == END
    assert theirs.decode([97, tokenizer.eos], skip_special_tokens=True) == tokenizer.decode([97])
    rng = random.Random(0)
    for _ in range(200):                     # halves of characters among them
        ids = [rng.randrange(tokenizer.n_vocab) for _ in range(20)]
        assert theirs.decode(ids) == tokenizer.decode(ids)
    again = Tokenizer(folder)
    assert again.encode(f"naïve {END}").tolist() == tokenizer.encode(f"naïve {END}").tolist()
    assert (again.n_vocab, again.eos, again.stop, again.pad, again.bos, again.template) == (
        tokenizer.n_vocab, tokenizer.eos, tokenizer.stop, tokenizer.pad, tokenizer.bos, tokenizer.template)


@pytest.mark.parametrize("name", ["bytes", pytest.param("gpt2", marks=pytest.mark.skipif(
    "TIKTOKEN_CACHE_DIR" not in os.environ, reason="GPT-2's own files are not here"))])
def test_built_in_tokenizers_go_to_transformers(tmp_path, name):
    assert_transformers_reads(Tokenizer(name), tmp_path / "out")


def test_gpt2_s_merges_are_found_again_and_go_to_transformers(small_gpt2, tmp_path):
    assert_transformers_reads(Tokenizer("gpt2"), tmp_path / "out")
    model = json.loads((tmp_path / "out/tokenizer.json").read_text())["model"]
    assert model["merges"] == small_gpt2 and len(small_gpt2) > 80


def test_a_run_s_tokenizer_lies_in_its_folder(tmp_path):
    about = Tokenizer(write(tmp_path / "elsewhere")).describe() | {"name": str(tmp_path / "elsewhere")}
    with pytest.raises(BadInput, match="an unknown tokenizer"):
        Tokenizer.of_run(tmp_path, about)


def spoiled(folder, name, content):
    write(folder)
    (folder / name).write_bytes(content)
    return folder


def says(folder, system):
    return write(folder, "smol", SMOL.replace("You are", system))


BPE = {"type": "BPE", "vocab": {}, "merges": []}
SLOW = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}      # fails at xxxx...
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
LACKING = {"type": "BPE", "vocab": {c: i for i, c in enumerate("the\u0120sak\u010a")}, "merges": []}
MARKING = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}        # Llama 2's
NOTHING = {"type": "Replace", "pattern": {"String": ""}, "content": "a"}                                  # panics


@pytest.mark.parametrize("make, words", [
    *((lambda t, system=system: says(t / "a", system), words) for system, words in (
        ("\\xZZ", "chat template in .*truncated"), ("\\N{NO}", "chat template in .*unknown Unicode"), ("\\ud800", "surrogates not allowed"))),
    *((lambda t, template=template: write(t / "a", chat=template), f"chat template in .*{words}") for template, words in (
        (5, "5 is no text"), (True, "True is no text"), ([1], "TypeError"), ([{"name": "default"}], "KeyError"), ([{"name": "default", "template": 3}], "3 is no text"))),
    (lambda t: changed(t / "a", model=BPE, added_tokens=[]), "encodes a text to no tokens"),
    (lambda t: changed(t / "a", model=BPE, added_tokens=[{"id": 0, "content": END, "special": True, **dict.fromkeys(
        ("single_word", "lstrip", "rstrip", "normalized"), False)}]), "encodes a text to no tokens"),
    (lambda t: changed(t / "a", pre_tokenizer=MARKING, model=BPE | {"vocab": dict(zip("\u2581ab", range(3)))}), "a piece of a text"),
    (lambda t: changed(t / "a", model=LACKING), "no ids for '.t' and .* other characters of 208, which a text would lose"),
    (lambda t: changed(t / "a", model=json.loads((write(t / "b") / "tokenizer.json").read_text())["model"] | {"dropout": 0.1}),
     "differently each time .dropout=0.1.: set dropout to null"),
    (lambda t: changed(t / "a", normalizer=NOTHING), "can't be used .*PanicException"),
    (lambda t: changed(t / "a", model={"type": "Unigram", "unk_id": None, "vocab": [["a", 0.0]]}), "can't be used .*unk_id"),
    (lambda t: write(t / "a", files={"config": {"eos_token_id": 2}}), "the text # to the id 2 .* correct eos_token_id"),
    (lambda t: "gpt3", "There is no tokenizer gpt3"), (lambda t: t / "none", "There is no tokenizer"),
    (lambda t: t, "has no tokenizer.json"),
    (lambda t: spoiled(t / "a", "tokenizer.json", b"{"), "not a readable tokenizer.json"),
    (lambda t: spoiled(t / "a", "tokenizer.json", b"\xff\x00"), "not a readable tokenizer.json"),
    (lambda t: spoiled(t / "a", "tokenizer.json", b"[]"), "not a readable tokenizer.json"),
    (lambda t: spoiled(t / "a", "tokenizer_config.json", b"{"), "tokenizer_config.json can't be read"),
    (lambda t: spoiled(t / "a", "tokenizer_config.json", b"[]"), "holds a list"),
    (lambda t: spoiled(t / "a", "tokenizer_config.json", b"{}"), "which token ends a text")])
def test_a_bad_tokenizer_is_one_sentence(tmp_path, make, words):
    with pytest.raises(BadInput, match=words) as e:
        Tokenizer(str(make(tmp_path))).prompt_ids("a")
    assert "\n" not in str(e.value) and str(e.value).endswith(".")


def test_a_pattern_that_gives_up_on_a_text_is_one_sentence(tmp_path):
    with pytest.raises(BadInput, match="tokenizer.json can't be used .PanicException"):
        Tokenizer(changed(tmp_path, pre_tokenizer={"type": "Sequence", "pretokenizers": [SLOW, BYTES]})).encode(30 * "x")


def test_a_post_processor_that_names_no_token_adds_none(tmp_path):
    post_processor = {"type": "TemplateProcessing", "pair": [], "single": [
        {"SpecialToken": {"id": "[X]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {"[X]": {"id": "[X]", "ids": [99999], "tokens": ["[X]"]}}}
    assert Tokenizer(changed(tmp_path, post_processor=post_processor)).bos is None





def test_truncation_and_padding_in_the_file_are_not_for_us(tmp_path):
    library = Library.from_file(str(write(tmp_path) / "tokenizer.json"))
    library.enable_truncation(4)
    library.enable_padding(length=64)
    library.save(str(tmp_path / "tokenizer.json"))
    text = "the cat sat on the mat"
    assert Tokenizer(tmp_path).decode(Tokenizer(tmp_path).encode(text)) == text


def test_threads_encode_at_once_and_others_run_meanwhile(tmp_path):
    tokenizer = Tokenizer(write(tmp_path, "smol"))
    text = "".join(LEARNT) * 800
    alone = tokenizer.encode(text)
    done = threading.Event()

    def ticks():
        return sum(1 for _ in iter(lambda: done.wait(0.001), True))
    with ThreadPoolExecutor(5) as pool:
        counted = pool.submit(ticks)
        results = list(pool.map(tokenizer.encode, 4 * [text]))
        done.set()
    assert all(np.array_equal(alone, ids) for ids in results) and counted.result() > 40


def merging():
    """A tokenizer whose merges run across white space, which a careless cut would break."""
    tokens = {bytes([i]): i for i in range(256)}
    for pair in (b"\n\n", b" \n", b"\n ", b"  ", b" t", b" a", b"th", b"the", b" \n ", b"\n\n\n"):
        tokens[pair] = len(tokens)
    return tiktoken_encoding("merging", tokens)


@pytest.mark.parametrize("kind", ["gpt2", "smol", "qwen", "merging"])
def test_preparing_in_pieces_equals_the_whole(tmp_path, text, kind, monkeypatch):
    monkeypatch.setattr(sources, "CHUNK", 300)
    monkeypatch.setitem(BUILT_IN, "merging", merging)
    tokenizer = Tokenizer(kind if kind == "merging" else write(tmp_path / "my model", kind))
    folder = data.prepare(str(text), tokenizer, tmp_path / "tokens")
    assert folder.name.startswith(f"cats-{tokenizer.name}-") and " " not in folder.name
    parts = [data.TokenFile(folder, split)[0:] for split in ("train", "valid")]
    for ids in parts:
        assert np.array_equal(ids, tokenizer.encode(tokenizer.decode(ids)))
    assert "".join(map(tokenizer.decode, parts)) == text.read_text()


# --- trained on one's own text ---

def test_a_trained_tokenizer_is_deterministic_and_usable_everywhere(text, tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    options = ["--vocab_size=340", f"--out={tmp_path / 'tok'}"]
    assert bpe.main([str(text), *options]) == 0
    assert "340 ids" in capsys.readouterr().out
    content = (tmp_path / "tok" / "tokenizer.json").read_bytes()
    assert bpe.main([str(text), *options]) == 0 and (tmp_path / "tok" / "tokenizer.json").read_bytes() == content
    # in lines, the same text has the same words
    lines = text.read_text().splitlines(keepends=True)
    random.Random(0).shuffle(lines)
    assert bpe.train(lines, 300, False) == bpe.train(sorted(lines), 300, False)
    tokenizer = Tokenizer(tmp_path / "tok")
    fast = transformers.AutoTokenizer.from_pretrained(tmp_path / "tok")
    assert tokenizer.n_vocab == 340 and tokenizer.decode([tokenizer.eos]) == END == fast.eos_token
    for sample in [text.read_text()[:2000], *unicode_texts(100)]:
        ids = tokenizer.encode(sample)
        assert tokenizer.decode(ids) == sample and tokenizer.eos not in ids
        if END not in sample:
            assert ids.tolist() == fast.encode(sample, add_special_tokens=False)
            assert ids.tolist() == tokenizer.encoding.fast.encode(sample, disallowed_special=())
    assert len(tokenizer.encode("the cat sat on a mat")) == 6
    assert tokenizer.encoding.fast
    every = "".join(f"a{chr(c)}1 " for c in range(0x30000) if not 0xD800 <= c < 0xE000)
    assert np.array_equal(tokenizer.encode(every), Library.from_str(content.decode()).encode(every).ids)
    done = trained(tmp_path / "run", text, tokenizer=tmp_path / "tok", max_steps=2, data_dir=tmp_path / "data")
    assert "bits/byte" in done.stdout


def test_digits_are_split_on_request_and_other_files_are_kept(text, tmp_path):
    numbers = ["1000 100000 1000000 " * 50]
    for split_digits, count in ((True, 4), (False, 1)):
        content = json.dumps(bpe.train(numbers, 270, split_digits))
        library = Library.from_str(content)
        assert len(library.encode("1000").ids) == count and (as_tiktoken(content) is None) == split_digits
    for name in ("tokenizer_config.json", "tokenizer.json"):
        folder = tmp_path / name.removesuffix(".json")
        folder.mkdir()
        (folder / name).write_text("{}")
        with pytest.raises(BadInput, match="exists and is not this tokenizer's: move it elsewhere, or choose another --out="):
            bpe.main([str(text), f"--out={folder}", "--vocab_size=300"])
        assert (folder / name).read_text() == "{}" and len(list(folder.iterdir())) == 1
    with pytest.raises(BadInput, match="Name a text"):
        bpe.main([])
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match="can't be made .*: choose another --out="):
        bpe.main([str(text), f"--out={tmp_path / 'file'}"])
    with pytest.raises(BadInput, match="--out is empty"):
        bpe.main([str(text), "--out="])
    with pytest.raises(BadInput, match="vocab_size"):
        bpe.main([str(text), "--vocab_size=256"])


def test_a_long_piece_takes_linear_time_and_gives_no_long_token():
    """200,000 characters took a minute and a half, and became one token."""
    model = bpe.train(["ab " * 9 + "=" * 200_000], 4096, False)["model"]
    assert max(map(len, model["vocab"])) == bpe.LONGEST and "ab" in model["vocab"]


def test_a_short_text_gives_fewer_ids(tmp_path, capsys):
    (tmp_path / "short.txt").write_text("abcabc " * 30)
    assert bpe.main([str(tmp_path / "short.txt"), "--vocab_size=1000", f"--out={tmp_path / 'tok'}"]) == 0
    assert "The text yields only 2" in capsys.readouterr().out
