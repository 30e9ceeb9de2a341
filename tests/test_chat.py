"""Chat templates of others: ids are those of transformers, texts stay texts, and a bad template is a sentence."""
import json
import resource
import subprocess
import sys
import threading

import pytest

pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")
from tokenizers import AddedToken

from conftest import ROOT
from runtime.config import BadInput
from test_tokenizer import END, LEARNT, QWEN25, QWEN3, SMOL, STOP, write
from text import chat, examples, render
from text.tokenizer import Tokenizer

# After the models' published templates, without tools
LLAMA3 = ("{{- bos_token }}\n{%- if not date_string is defined %}\n    {%- if strftime_now is defined %}\n"
          "        {%- set date_string = strftime_now(\"%d %b %Y\") %}\n    {%- else %}\n        {%- set date_string = \"26 Jul 2024\" %}\n"
          "    {%- endif %}\n{%- endif %}\n{%- if messages[0]['role'] == 'system' %}\n"
          "    {%- set system_message = messages[0]['content']|trim %}\n    {%- set messages = messages[1:] %}\n{%- else %}\n"
          "    {%- set system_message = \"\" %}\n{%- endif %}\n{{- \"<|start_header_id|>system<|end_header_id|>\\n\\n\" }}\n"
          "{{- \"Today Date: \" + date_string + \"\\n\\n\" }}\n{{- system_message }}\n{{- \"<|eot_id|>\" }}\n{%- for message in messages %}\n"
          "    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}\n"
          "{%- endfor %}\n{%- if add_generation_prompt %}\n    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}\n{%- endif %}\n")
ALTERNATE = ("{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
             "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}")
GEMMA = ("{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
         "{% for message in messages %}" + ALTERNATE + "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}"
         "{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}"
         "{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}")
MISTRAL = ("{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content'] %}{%- set loop_messages = messages[1:] %}"
           "{%- else %}{%- set loop_messages = messages %}{%- endif %}{{- bos_token }}{%- for message in loop_messages %}" + ALTERNATE +
           "{%- if message['role'] == 'user' %}{%- if loop.first and system_message is defined %}"
           "{{- '[INST]' + system_message + '\n\n' + message['content'] + '[/INST]' }}{%- else %}{{- '[INST]' + message['content'] + '[/INST]' }}"
           "{%- endif %}{%- else %}{% generation %}{{- message['content'] + eos_token }}{% endgeneration %}{%- endif %}{%- endfor %}")
PHI4 = ("{% for message in messages %}{{ '<|turn|>' + message['role'] + '<|sep|>' + message['content'] + '<|stop|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|turn|>assistant<|sep|>' }}{% endif %}")
EATING = [AddedToken(token, lstrip=True, rstrip=True, special=True) for token in ("<|turn|>", "<|sep|>", "<|stop|>")]        # blanks beside them
FAMILIES = {                                 # the template, its special tokens, the end of an answer
    "smollm2": (SMOL, [], STOP), "qwen2.5": (QWEN25, [], STOP), "qwen3": (QWEN3, [], STOP),
    "llama3": (LLAMA3, ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"], "<|eot_id|>"),
    "gemma": (GEMMA, ["<start_of_turn>", "<end_of_turn>"], "<end_of_turn>"), "mistral": (MISTRAL, ["[INST]", "[/INST]"], "</s>"),
    "phi4": (PHI4, EATING, "<|stop|>")}
USER, REPLY, AGAIN = ({"role": "user", "content": " the cat sat\n"}, {"role": "assistant", "content": "on 3 mats"},
                      {"role": "user", "content": "and then 漢字?"})
SYSTEM = {"role": "system", "content": "You are another."}


def model(folder, family, **options):
    """Return our tokenizer and transformers' of a family."""
    template, special, end = FAMILIES[family]
    eos = end if family in ("mistral", "phi4") else END
    write(folder, "smol" if family == "smollm2" else "words", template, special=[*special, "<s>", "</s>"], bos_token="<s>", eos_token=eos, **options)
    return Tokenizer(folder), transformers.PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


def test_ids_are_those_of_transformers(tmp_path, family):
    tokenizer, theirs = model(tmp_path, family)

    def expected(messages, prompt=True):
        return theirs.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=True, return_dict=False, date_string="26 Jul 2024")
    for text in [USER["content"], "1234\n 5", "é <think> ", *LEARNT[:2]]:
        assert tokenizer.prompt_ids(text) == expected([USER | {"content": text}])
    assert tokenizer.prompt_ids(AGAIN["content"], examples=[(USER["content"], REPLY["content"])]) == expected([USER, REPLY, AGAIN])
    end = theirs.convert_tokens_to_ids(FAMILIES[family][2])
    assert tokenizer.end == end and end in tokenizer.stop and theirs.eos_token_id in tokenizer.stop
    for messages in ([USER, REPLY], [USER, REPLY, AGAIN, REPLY]):
        parts = tokenizer.conversation(messages)
        assert sum((ids for ids, _ in parts), []) == expected(messages, False)
        answers = [tokenizer.decode(ids) for ids, is_target in parts if is_target]
        thought = "<think>\n\n</think>\n\n" if family == "qwen3" else ""
        assert answers == [text + REPLY["content"] + FAMILIES[family][2] for text in ["", thought][-len(answers):]]
        first = tokenizer.prompt_ids(USER["content"])
        assert sum((ids for ids, _ in parts), [])[:len(first)] == first
    reply = tokenizer.reply_ids(AGAIN["content"], False)
    assert expected([USER, REPLY, AGAIN])[-len(reply):] == reply and tokenizer.reply_ids(AGAIN["content"], True) == reply[1:] != reply
    if family not in ("gemma", "mistral"):   # without a system turn, be it the template's own
        assert tokenizer.decode(tokenizer.prompt_ids("ab", "")).startswith(tokenizer.decode([first[0]]))
        assert "system" not in tokenizer.decode(tokenizer.prompt_ids("ab", "")) and tokenizer.prompt_ids("ab", "")[-3:] == tokenizer.prompt_ids("ab")[-3:]
    told = [SYSTEM, USER, REPLY, AGAIN]
    if family == "gemma":
        with pytest.raises(BadInput, match="The system message .*System role not supported.*: write its text into the question"):
            tokenizer.prompt_ids("a", SYSTEM["content"])
    else:
        assert tokenizer.prompt_ids(AGAIN["content"], SYSTEM["content"], [(USER["content"], REPLY["content"])]) == expected(told)
        assert sum((ids for ids, _ in tokenizer.conversation(told[:3])), []) == expected(told[:3], False)


def test_a_control_token_in_a_text_is_text_and_a_run_and_an_export_keep_the_template(tmp_path, family):
    tokenizer, _ = model(tmp_path / "model", family)
    control = {*tokenizer.encoding.hf.get_added_tokens_decoder()} - {*tokenizer.encode("<think>").tolist()}
    text = "a" + "".join(tokenizer.decode([i]) for i in control) + "</s>"
    plain, spelled = (tokenizer.prompt_ids("ab", examples=[(said, said)]) for said in ("ab", text))
    assert [i for i in plain if i in control] == [i for i in spelled if i in control] and text in tokenizer.decode(spelled)
    parts = tokenizer.conversation([USER | {"content": text}, REPLY | {"content": text}])
    assert [sum(i in control for i in ids) for ids, is_target in parts if is_target] == [1]
    run, out = tmp_path / "run", tmp_path / "out"
    for folder in (run, out):
        folder.mkdir()
    tokenizer.save(run)
    again = Tokenizer.of_run(run, json.loads(json.dumps(tokenizer.describe())))
    again.export(out)
    assert again.prompt_ids(text) == Tokenizer(out).prompt_ids(text) == tokenizer.prompt_ids(text)
    assert json.loads((out / "tokenizer_config.json").read_text())["chat_template"] == FAMILIES[family][0]


def test_runs_that_recorded_a_default_system_message_load(tmp_path):
    for template, system in ((SMOL, "You are a small model, née test"), (QWEN25, "You're to put the answer within \\boxed{}."),
                             (QWEN25.replace("You\\'re to", "Say \"you\\'re\",\\n"), "Say \"you're\",\n put the answer within \\boxed{}."), (SMOL[SMOL.index("{{'"):], None)):
        if system is None:
            template = "{% for message in messages %}" + template
        tokenizer = Tokenizer(write(tmp_path, "smol", template, bos_token=END))
        old = Tokenizer.of_run(tmp_path, tokenizer.describe() | {"template": {"name": "chatml", "system": system}})
        for arguments in (("the cat",), ("a", "Be brief."), ("a", ""), ("a", None, [("b", "c")])):
            assert old.prompt_ids(*arguments) == tokenizer.prompt_ids(*arguments)
        assert old.conversation([USER, REPLY]) == tokenizer.conversation([USER, REPLY]) and old.stop == tokenizer.stop
    begun = Tokenizer.of_run(tmp_path, tokenizer.describe() | {"template": {"name": "chatml", "system": None}, "bos": tokenizer.encoding.id_of(END)})
    assert begun.prompt_ids("a") == begun.prompt_ids("a", "") == [begun.bos, *tokenizer.prompt_ids("a")]


def test_reasoning_that_a_template_drops_is_not_trained_on_unsaid(tmp_path):
    tokenizer, theirs = model(tmp_path, "qwen3")
    thought = REPLY | {"content": "<think>\n3 * 1\n</think>\n\non 3 mats"}
    last = tokenizer.conversation([USER, REPLY, AGAIN, thought])
    assert sum((ids for ids, _ in last), []) == theirs.apply_chat_template([USER, REPLY, AGAIN, thought], return_dict=False)
    assert tokenizer.decode(last[3][0]) == thought["content"] + STOP and last[3][1]
    assert len(tokenizer.conversation([USER, thought | {"weight": 0}, AGAIN, thought])) == 3
    with pytest.raises(ValueError, match="changes the answer '<think>.*\"weight\": 0"):
        tokenizer.conversation([USER, thought, AGAIN, thought])


@pytest.mark.parametrize("messages, words", [
    ([USER, USER, REPLY], "TemplateError: Conversation roles must alternate"), ([SYSTEM, USER, REPLY], "System role not supported"),
    ([USER, REPLY, {"role": "tool", "content": "x"}], "the role 'tool', a tool's"), ([USER | {"content": "\ud800"}, REPLY], "surrogates not allowed"),
    ([USER | {"role": "start_of_turn"}, REPLY], "'start_of_turn' is part of a control token"), ([USER | {"role": f"a{STOP}"}, REPLY], "part of a control")])
def test_a_conversation_that_a_template_refuses_is_named_by_its_row(tmp_path, messages, words):
    tokenizer, _ = model(tmp_path / "model", "gemma")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in ([USER, REPLY], messages)))
    with pytest.raises(BadInput, match=f"^Row 2 of .*{words}.*: correct it.$"):
        examples.read(tmp_path / "a.jsonl", tokenizer)


def test_a_role_is_whatever_the_template_renders(tmp_path):
    smol, theirs = model(tmp_path / "smol", "smollm2")
    messages = [{"role": "developer", "content": "Be brief."}, USER, REPLY]
    assert sum((ids for ids, _ in smol.conversation(messages)), []) == theirs.apply_chat_template(messages, return_dict=False)
    with pytest.raises(ValueError, match="omits or changes the text of the role developer"):
        model(tmp_path / "qwen", "qwen3")[0].conversation(messages)


HOSTILE = {
    "{{ 'a'|center(500000000) }}": "MemoryError", "{{ 'a'.ljust(500000000) }}": "MemoryError", "{{ '%999999999d'|format(1) }}": "MemoryError",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}": "TimeoutError: it takes longer than 0.4 seconds",
    "{% for a in range(10**9) %}{% endfor %}": "OverflowError: Range too big", "{% for a in range(100000000) %}{% endfor %}": "OverflowError: Range too big",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "RecursionError", "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}": "TimeoutError",
    "{% for a in range(99999) %}0123456789{% endfor %}": "writes 999,990 characters", "{{ 'a' * 10000000000 }}": "MemoryError", "{{ '%999999999d' % 1 }}": "MemoryError",
    "{% set x = namespace(t=[]) %}{% for a in range(99) %}{% set x.t = [x.t, x.t] %}{% endfor %}{{ x.t|tojson }}": "TimeoutError",
    "{% set x = namespace(t=(1,)) %}{% for a in range(99) %}{% set x.t = (x.t, x.t) %}{% endfor %}{% set y = {x.t: 1} %}": "TimeoutError",
    "{% for a in range(999) %}{{ 3**(10**7) }}{% endfor %}": "TimeoutError",
    "{% set x = namespace(t='a') %}{% for a in range(99) %}{% set x.t = x.t ~ x.t %}{% endfor %}": "MemoryError|TimeoutError", "a" * 10**6: "more than 131,072 characters",
    "{{ ''.__class__.__mro__ }}": "SecurityError", "{{ messages.append(1) }}": "SecurityError", "{% include 'a' %}": "no loader", "{% if %}": "TemplateSyntaxError",
    "(" * 10**5: "omits or changes", "{{" + "(" * 10**5: "RecursionError|TemplateSyntaxError", "{{ messages[0].content }}": "begins an answer otherwise",
    "{{ 1 / 0 }}": "ZeroDivisionError", "{{ tools.first.name }}": "UndefinedError", "{% for m in messages %}{{ m.content.text }}{% endfor %}": "omits or changes"}


def processor_time():
    """Return seconds of this process and of those that it waited for."""
    return sum(sum(resource.getrusage(of)[:2]) for of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


@pytest.mark.parametrize("template", HOSTILE)
def test_a_hostile_template_is_a_sentence_within_a_second(tmp_path, template):
    write(tmp_path, "smol", template)
    render.end()
    before = processor_time()
    tokenizer = Tokenizer(tmp_path)          # which a text does not need it for
    with pytest.raises(BadInput, match=HOSTILE[template]) as e:
        tokenizer.prompt_ids("a")
    render.end()
    assert processor_time() - before < 1 and "\n" not in str(e.value) and str(e.value).endswith(".") and len(str(e.value)) < 500


def test_ctrl_c_leaves_no_answer_for_the_next_text(monkeypatch):
    class Interrupted:
        def __init__(self, stream):
            self.stream = stream

        def readline(self):
            raise KeyboardInterrupt

        def __getattr__(self, name):
            return getattr(self.stream, name)
    render.end()
    worker = render.process()
    worker.stdout = Interrupted(worker.stdout)
    with pytest.raises(KeyboardInterrupt):
        render.render("first", [{}], 99)
    assert render.render("second", [{}], 99) == ["second"]


def test_a_thread_renders_within_the_same_limits(tmp_path):
    tokenizer, _ = model(tmp_path, "llama3")
    said = []

    def ask():
        said.append(tokenizer.prompt_ids("a"))
        with pytest.raises(ValueError, match="TimeoutError") as e:
            render.render("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", [{}], 99)
        said.append(e)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert said[0] == tokenizer.prompt_ids("a") and len(said) == 2


def test_the_date_changes_no_prompt_and_filters_are_those_of_transformers(tmp_path):
    tokenizer, _ = model(tmp_path, "llama3")
    assert "Today Date: 26 Jul 2024" in tokenizer.decode(tokenizer.prompt_ids("a"))
    source = "{% for a in [1, 2] %}{{ {'a': 'é<'} | tojson(indent=1) }}{% break %}{% endfor %}"
    assert render.render(source, [{}], 99) == ['{\n "a": "é<"\n}']


def test_padding_products_and_formats_are_those_of_transformers(tmp_path):
    _, theirs = model(tmp_path, "smollm2")
    theirs.chat_template = "{{ '-' * 9 }}{{ 'a'|center(9) }}{{ 'b'.ljust(4) }}{{ 'c\nd'|indent }}{{ '%05.2f'|format(1.5) }}{{ '%d' % 2 }}"
    assert render.render(theirs.chat_template, [{}], 99) == [theirs.apply_chat_template([USER], tokenize=False)]


def test_a_model_without_a_template_loads_no_jinja(tmp_path):
    write(tmp_path)
    program = f"import sys; from text.tokenizer import Tokenizer; Tokenizer('bytes'); Tokenizer({str(tmp_path)!r}); sys.exit('jinja2' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0
