"""Evaluate a model with EleutherAI's lm-evaluation-harness, for figures that others can compare.

    python -m hub.lm_eval out/base --tasks=arc_easy,hellaswag --num_fewshot=5
    python -m hub.lm_eval FOLDER --tasks=my_task --include_path=tasks_of_mine --model_args max_length=512

All other options of `lm_eval run` except --batch_size apply: tokens_per_micro_batch= in --model_args replaces
it. The endings of a question share the forward pass of its text.
"""
import json
import sys

import torch

from runtime import guard, hardware, memory
from runtime.config import DTYPE_ALIASES, BadInput

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as e:
    guard.say_error(f"lm-evaluation-harness can't be imported ({e}): pip install lm-eval.")
    sys.exit(2)

import hub
from engine import Engine, Request, Sampling
from rollouts.batch import MICRO_BATCH, MICRO_BATCH_ON_CPU, micro_batches, padded
from rollouts.pipeline import Completion
from runtime.progress import track
from text.chat import MARK
from text.tokenizer import BUILT_IN

OPTIONS = {"do_sample", "until", "max_gen_toks", "temperature", "top_k", "top_p", "min_p"}     # of generation


@register_model("nanorft")
class NanoRFT(TemplateLM):
    """A run folder, Hugging Face folder, GGUF file or hub name as a model of the harness."""
    eot_token_id = tokenizer_name = prefix_token_id = None       # abstract there, set below

    def __init__(self, path, device="auto", dtype="fp32", max_length=None, prefix_token_id=None,
                 tokens_per_micro_batch=None, batch_size=None, max_batch_size=None):
        super().__init__()
        dtype = DTYPE_ALIASES.get(dtype, dtype)
        self.hw = hardware.setup(device, dtype, tf32=dtype != "fp32", compile=False)
        source = hub.find(path)
        self.tokenizer_name = str(path)
        tokenizer = source.tokenizer()
        self.tokenizer = tokenizer
        added = {} if tokenizer.name in BUILT_IN else tokenizer.encoding.hf.get_added_tokens_decoder()
        self.special = {*tokenizer.stop, *(i for i, token in added.items() if token.special)}
        self.eot_token_id = tokenizer.eos
        first = prefix_token_id, tokenizer.bos, tokenizer.eos
        self.prefix_token_id = next(i for i in first if i is not None)
        self.model = source.load(self.hw.attention, device=self.hw.device)
        self.max_length = min(max_length or source.config.block_size, source.config.block_size)
        usual = MICRO_BATCH_ON_CPU if self.hw.device.type == "cpu" else MICRO_BATCH
        self.tokens = tokens_per_micro_batch or usual

    def chat_template(self, chat_template=True):
        if chat_template and not self.tokenizer.is_chat:
            raise BadInput(f"{self.tokenizer_name} has no chat template: leave out --apply_chat_template.")
        return self.tokenizer.template["text"] if chat_template else ""

    def apply_chat_template(self, chat_history, add_generation_prompt=True):
        chat = self.tokenizer.chat
        text = chat.render(chat_history, add_generation_prompt).replace(MARK, "")
        return text if add_generation_prompt else text.rpartition(chat.end)[0]

    def tok_encode(self, string, add_special_tokens=None, **_):
        """Return the ids of a text; for a chat model, special tokens in it become control tokens."""
        encode = self.tokenizer.encode
        ids = self.tokenizer.chat.ids(string, encode) if self.tokenizer.is_chat else encode(string).tolist()
        bos = [] if self.tokenizer.bos is None or add_special_tokens is False else [self.tokenizer.bos]
        return ids if ids[:1] == bos else bos + ids

    @torch.no_grad()
    def _loglikelihood_tokens(self, requests, **_):
        """Return [(log-likelihood of the continuation in nats, whether greedy decoding would give it)] of
        requests (texts, ids of the context, ids of the continuation). A long context loses its beginning."""
        completions = []
        for key, (_, context, ids) in enumerate(requests):
            if not 0 < len(ids) <= self.max_length:
                raise BadInput(f"{len(ids)} tokens don't fit {self.max_length} positions: leave out this "
                               "task.")
            prompt = (context or [self.prefix_token_id])[-(self.max_length + 1 - len(ids)):]
            completions.append(Completion(prompt, ids, None, True, key=key))
        results = [None] * len(completions)
        parts = micro_batches(completions, self.tokens, self.hw.length_multiple)
        for part in track(parts, "computing log-likelihoods", "batches"):
            batch = padded(part, self.hw.length_multiple).to(self.hw.device)
            with self.hw.autocast():
                h = self.model.hidden_at(batch.x, batch.prefixes, batch.target_index)
                rows = self.model.rows_per_chunk(h.device)
                targets = batch.y.flatten()[batch.target_index].split(rows)
                scores = [torch.cat(s).cpu() for s in zip(*map(self.score, h.split(rows), targets))]
            for c, logprobs, greedy in zip(part, *(s.split([len(c.ids) for c in part]) for s in scores)):
                results[c.key] = logprobs.double().sum().item(), greedy.all().item()
        return results

    def score(self, h, y):
        """Return the logprobs [N] of ids y [N] at hidden states h [N, C], and whether each is likeliest."""
        logits = self.model.logits(h)
        return logits.log_softmax(-1).gather(1, y[:, None])[:, 0], logits.argmax(-1) == y

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        ids = [self.tok_encode(request.args[0]) for request in requests]
        windows = [(key, *make_disjoint_window(window)) for key in range(len(ids)) for window in
                   get_rolling_token_windows(ids[key], self.prefix_token_id, self.max_length, 1)]
        sums = [0.0] * len(requests)
        for (key, *_), (logprob, _) in zip(windows, self._loglikelihood_tokens(windows)):
            sums[key] += logprob
        return sums

    def generate_until(self, requests, disable_tqdm=False):
        texts = [None] * len(requests)
        ids_of = {}                          # {options as JSON: {number of the request: ids}}
        for key, (text, options) in enumerate(request.args for request in requests):
            ids = self.tok_encode(text) or [self.prefix_token_id]
            ids_of.setdefault(json.dumps(options), {})[key] = ids
        for options, prompts in ids_of.items():
            given = normalize_gen_kwargs(json.loads(options))
            until = handle_stop_sequences(given.get("until"), eos=None)
            new = given["max_gen_toks"]
            if new >= self.max_length or given.keys() - OPTIONS:
                raise BadInput(f"{options} can't be used with {self.max_length} positions: give a smaller "
                               f"max_gen_toks, or only the options {', '.join(sorted(OPTIONS))}.")
            sampling = Sampling(given.get("temperature", 0.0), given.get("top_k"), given.get("top_p", 1.0),
                                given.get("min_p", 0.0), self.tokenizer.stop, tuple(filter(None, until)))
            context = min(self.max_length, max(map(len, prompts.values())) + new)
            engine = Engine(self.model, None, context, sampling, seed=torch.initial_seed() % 2**63,
                            samples=len(prompts), dtype=self.hw.sampling_dtype, decode=self.tokenizer.decode)
            samples = engine.generate(Request(ids[new - self.max_length:], 1, key, new)
                                      for key, ids in prompts.items())
            for sample in track(samples, "generating", "texts", len(prompts)):
                text = self.tokenizer.decode([i for i in sample.ids if i not in self.special])
                texts[sample.request.key] = postprocess_generated_text(text, until, None)
            engine = samples = None
            memory.release()                 # before the next engine
        return texts


def main(argv):
    if not argv or argv[0].startswith("-"):
        raise BadInput("Name a model and tasks: python -m hub.lm_eval out/base --tasks=arc_easy")
    path = json.dumps({"path": argv[0]})
    sys.argv = ["lm_eval", "run", "--model=nanorft", "--device=auto", "--model_args", path, *argv[1:]]
    try:
        cli_evaluate()
    except (ValueError, FileNotFoundError) as e:             # options that the harness or the engine refuse
        raise BadInput(f"The harness stopped ({e}): correct the options.") from None
    return 0


if __name__ == "__main__":
    guard.run(main)
