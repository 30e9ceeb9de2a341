"""The adapter for lm-evaluation-harness gives the figures of the harness's own backend for transformers."""
import json
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("lm_eval")
transformers = pytest.importorskip("transformers")
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from runtime.config import BadInput
from hub.lm_eval import NanoRFT, main
from test_tokenizer import SMOL, write

CHOICES = ["3000 gram", "30", "<answer>6000</answer>\n", "naïve 漢字 don't"]


def tasks(folder):
    """Return the harness's descriptions of tasks over the lines of a local file: choices of unequal length, the perplexity of
    texts longer than the model's context, and texts generated up to a stop text or a number of tokens."""
    rows = [{"q": f"How many gram are there per {n} kg?" + " 42" * n, "choices": CHOICES[:2 + n % 3], "gold": n % 2}
            for n in range(8)]
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = dict(dataset_path="json", dataset_kwargs={"data_files": {"test": str(file)}}, test_split="test",
                  doc_to_text="Question: {{q}}\n ")
    return [
        common | dict(task="choices", output_type="multiple_choice", doc_to_choice="{{choices}}", doc_to_target="{{gold}}"),
        common | dict(task="texts", output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="{{(q + ' ') * 12}}"),
        common | dict(task="answers", output_type="generate_until", doc_to_target="6",
                      generation_kwargs={"until": ["2", "ver"], "max_gen_toks": 24, "do_sample": False}),
        common | dict(task="begun", output_type="generate_until", doc_to_target="6", gen_prefix="The answer is",
                      generation_kwargs={"until": ["2"], "max_gen_toks": 12}),
    ]


def responses(results):
    """Return {task: [the model's responses to a row]}."""
    return {name: [sample["resps"] for sample in rows] for name, rows in results["samples"].items()}


@pytest.fixture(scope="module", params=["plain", "chat"])
def both(request, tmp_path_factory):
    """Return (our results, those of the harness's own backend) for a random model."""
    folder = tmp_path_factory.mktemp("model")
    chat = request.param == "chat"
    write(folder, *(["smol", SMOL] if chat else []))
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=400, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=128, initializer_range=0.1, bos_token_id=None, eos_token_id=None))
    model.save_pretrained(folder)
    options = dict(tasks=tasks(folder), bootstrap_iters=0, apply_chat_template=chat, num_fewshot=1 if chat else 0,
                   task_manager=TaskManager(include_defaults=False))        # their own tasks take half a minute to read
    model = NanoRFT(folder, device="cpu", tokens_per_micro_batch=300)
    assert not model.model.training          # no dropout
    ours = simple_evaluate(model, **options)
    theirs = simple_evaluate("hf", f"pretrained={folder},dtype=float32,prefix_token_id={model.prefix_token_id}",
                             device="cpu", **options)
    return ours, theirs


def test_log_likelihoods_are_those_of_transformers(both):
    ours, theirs = both
    for task in ("choices", "texts"):
        for mine, its in zip(responses(ours)[task], responses(theirs)[task], strict=True):
            mine, its = (torch.tensor(response, dtype=torch.float64).flatten() for response in (mine, its))
            torch.testing.assert_close(mine, its, atol=1e-4, rtol=1e-4)
    for name in ("acc,none", "acc_norm,none"):
        assert ours["results"]["choices"][name] == theirs["results"]["choices"][name]
    assert ours["results"]["texts"]["bits_per_byte,none"] == pytest.approx(theirs["results"]["texts"]["bits_per_byte,none"], abs=1e-4)


def test_generated_texts_are_those_of_transformers(both):
    ours, theirs = both
    for task in ("answers", "begun"):
        assert responses(ours)[task] == responses(theirs)[task]


def test_a_special_token_that_does_not_stop_is_not_in_the_text(tmp_path, monkeypatch):
    write(tmp_path, "smol")                  # <|im_start|> and <|im_end|>, but no chat template
    transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=400, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=16, bos_token_id=None, eos_token_id=None)).save_pretrained(tmp_path)
    model = NanoRFT(tmp_path, device="cpu")
    start, think = (model.tokenizer.encoding.id_of(token) for token in ("<|im_start|>", "<think>"))
    ids = [start, *model.tokenizer.encode("a cat").tolist(), think, start, model.eot_token_id]
    sample = SimpleNamespace(ids=ids, request=SimpleNamespace(key=0))
    monkeypatch.setattr("hub.lm_eval.Engine.generate", lambda self, requests: [sample])
    assert model.generate_until([SimpleNamespace(args=("?", {"max_gen_toks": 8}))]) == ["a cat<think>"]


def test_bad_input_is_a_sentence(tmp_path):
    with pytest.raises(BadInput, match="Name a model"):
        main(["--tasks=choices"])
    write(tmp_path)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=400, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=16, bos_token_id=None, eos_token_id=None)).save_pretrained(tmp_path)
    model = NanoRFT(tmp_path, device="cpu")
    for ids in ([], [2] * 17):
        with pytest.raises(BadInput, match=f"{len(ids)} tokens don't fit 16 positions: leave out this task"):
            model._loglikelihood_tokens([(None, [1], ids)])
    with pytest.raises(BadInput, match="no chat template"):
        model.chat_template(True)
    for options in ({"max_gen_toks": 16}, {"max_gen_toks": 3, "repetition_penalty": 2.0}):
        with pytest.raises(BadInput, match="can't be used with 16 positions: give a smaller max_gen_toks, or only the options do_"):
            model.generate_until([SimpleNamespace(args=("?", options))])
    empty, one = model._loglikelihood_tokens([(None, [], [5]), (None, [model.eot_token_id], [5])])
    assert empty == one and one[0] < 0
