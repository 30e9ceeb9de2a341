"""Evaluate a model with EleutherAI's lm-evaluation-harness, for figures that others can compare.

    python -m studies.lm_eval out/base --tasks=arc_easy,hellaswag --num_fewshot=5
    python -m studies.lm_eval FOLDER --tasks=my_task --include_path=tasks_of_mine --model_args max_length=512

Further options are those of `lm_eval run`. The endings of a question share the forward pass of its text.
"""
import json
import re
import sys

import jinja2
import torch
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

import hf
from engine import Engine, Request, Sampling
from rollouts.batch import micro_batches, padded
from rollouts.pipeline import Completion
from runtime import guard, hardware
from runtime.config import BadInput
from runtime.progress import track
from text.tokenizer import IM_END, IM_START, chatml_jinja

CONTROL = re.compile(f"({re.escape(IM_START)}|{re.escape(IM_END)})")
LONGEST_ANSWER = 256                         # tokens, unless the task says: as in the harness


@register_model("nanorft")
class NanoRFT(TemplateLM):
    """A run folder, Hugging Face folder, GGUF file or hub name as a model of the harness."""
    eot_token_id = tokenizer_name = prefix_token_id = None

    def __init__(self, path, device="auto", dtype="fp32", max_length=None, tokens_per_micro_batch=None, **_):
        super().__init__()
        self.hw = hardware.setup(device, dtype, tf32=dtype != "fp32", compile=False)
        source = hf.find(path)
        self.name = self.tokenizer_name = str(path)
        self.tokenizer = source.tokenizer()
        self.model = source.load(device=self.hw.device)
        self.max_length = min(max_length or source.config.block_size, source.config.block_size)
        tokenizer = self.tokenizer
        self.eot_token_id = tokenizer.eos
        self.prefix_token_id = tokenizer.eos if tokenizer.bos is None else tokenizer.bos
        self.control = {IM_START: tokenizer.start, IM_END: tokenizer.end} if tokenizer.is_chat else {}
        self.tokens = tokens_per_micro_batch or (2048 if self.hw.device.type == "cpu" else 65536)

    def chat_template(self, chat_template=True):
        return chatml_jinja(self.tokenizer.template["system"], bos=False) if chat_template else ""

    def apply_chat_template(self, chat_history, add_generation_prompt=True):
        if not self.tokenizer.is_chat:
            raise BadInput(f"{self.name} has no chat template: leave out --apply_chat_template.")
        template = jinja2.Template(self.chat_template(), keep_trailing_newline=True)
        return template.render(messages=chat_history, add_generation_prompt=add_generation_prompt)

    def tok_encode(self, string, add_special_tokens=None, **_):
        """Return the ids of a text, in which the chat template's tokens are control tokens."""
        bos = self.tokenizer.bos
        ids = [] if bos is None or add_special_tokens is False else [bos]
        for part in CONTROL.split(string) if self.control else [string]:
            ids += [self.control[part]] if part in self.control else self.tokenizer.encode(part).tolist()
        return ids

    @torch.no_grad()
    def _loglikelihood_tokens(self, requests, **_):
        """Return [(log-likelihood of the continuation in nats, whether greedy decoding would give it)] of
        requests (texts, ids of the context, ids of the continuation). A long context loses its beginning."""
        completions = []
        for key, (_, context, ids) in enumerate(requests):
            if len(ids) > self.max_length:
                raise BadInput(f"A continuation of {len(ids)} tokens is longer than the model's context of "
                               f"{self.max_length}: leave out this task.")
            prompt = context[-(self.max_length + 1 - len(ids)):]
            completions.append(Completion(prompt, ids, [0.0] * len(ids), True, key=key))
        results = [None] * len(completions)
        parts = micro_batches(completions, self.tokens, self.hw.length_multiple)
        for part in track(parts, "computing log-likelihoods", "batches"):
            batch = padded(part, self.hw.length_multiple).to(self.hw.device)
            with self.hw.autocast():
                h = self.model.hidden_at(batch.x, batch.prefixes, batch.target_index)
                rows = self.model.rows_per_chunk(h.device)
                targets = batch.y.flatten()[batch.target_index].split(rows)
                scores = map(torch.cat, zip(*map(self.score, h.split(rows), targets)))
            for c, *of_c in zip(part, *(score.split([len(c.ids) for c in part]) for score in scores)):
                results[c.key] = of_c[0].sum().item(), of_c[1].all().item()
        return results

    def score(self, h, y):
        """Return the fp64 logprobs [N] of ids y [N] at hidden states h [N, C], and whether y is likeliest."""
        logits = self.model.logits(h)
        return logits.log_softmax(-1).gather(1, y[:, None])[:, 0].double(), logits.argmax(-1) == y

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        windows = []
        for key, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1):
                windows.append((key, *make_disjoint_window(window)))
        sums = [0.0] * len(requests)
        for (key, *_), (logprob, _) in zip(windows, self._loglikelihood_tokens(windows)):
            sums[key] += logprob
        return sums

    def generate_until(self, requests, disable_tqdm=False):
        engine = Engine(self.model, context=self.max_length, dtype=self.hw.sampling_dtype,
                        decode=self.tokenizer.decode)
        texts = [None] * len(requests)
        for options in {json.dumps(request.args[1]) for request in requests}:        # of one task or several
            given = normalize_gen_kwargs(json.loads(options), LONGEST_ANSWER)
            until = handle_stop_sequences(given.get("until"), eos=None)
            sampling = Sampling(given.get("temperature", 0.0), given.get("top_k"), given.get("top_p", 1.0),
                                stop=self.tokenizer.stop, stop_strings=filter(None, until))
            new = min(given["max_gen_toks"], self.max_length - 1)
            prompts = [Request(self.tok_encode(request.args[0])[new - self.max_length:], 1, key, new)
                       for key, request in enumerate(requests) if json.dumps(request.args[1]) == options]
            samples = engine.generate(prompts, sampling=sampling)
            for sample in track(samples, "generating", "texts", len(prompts)):
                text = self.tokenizer.text_of(sample.ids)
                texts[sample.request.key] = postprocess_generated_text(text, until, None)
        return texts


def main(argv):
    if not argv or argv[0].startswith("-"):
        raise BadInput("Name a model and tasks: python -m studies.lm_eval out/base --tasks=arc_easy")
    path = ["--model=nanorft", "--device=auto", "--model_args", f"path={argv[0]}"]
    sys.argv = ["lm_eval", "run", *path, *argv[1:]]
    cli_evaluate()
    return 0


if __name__ == "__main__":
    guard.run(main)
