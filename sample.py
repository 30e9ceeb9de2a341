"""Sample text from a model after a prompt.

    python sample.py out/base --prompt="Question: How many gram are there per 6 kg?" --num_samples=4
    python sample.py out/grpo --task=unit_conversion --versus=out/rft         one of the task's own questions
    python sample.py HuggingFaceTB/SmolLM2-360M-Instruct --chat         /reset, /temperature 0.7; Ctrl-D ends
    python sample.py out/base --interactive                                   one independent prompt per line
    torchrun --nproc_per_node=8 sample.py out/base --num_samples=1000
"""
import dataclasses
import random
import shutil
import sys
import textwrap
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

from runtime.usage import end_with_reader, first_line

first_line()                             # --help without the seconds that importing PyTorch takes

import hub
from engine import Engine, Request, Sampling
from runtime import config, distributed, guard, hardware, memory
from runtime.config import Count, NonNegativeFloat, NonNegativeInt, PositiveInt, UnitInterval
from runtime.progress import track
from text.prompts import context_of, instruction_of, prompt_ids


@dataclass
class Config:
    model: str = ""                          # run folder, Hugging Face folder, GGUF file or hub name,
                                             # first on the command line
    prompt: str = ""                         # empty: a test question of --task, drawn by the seed; without
                                             # --task the end-of-text token, which precedes a document, or
                                             # an empty message to a chat model
    versus: str | None = None                # another model, whose samples are shown beside
    interactive: bool = False                # read independent prompts from standard input, one per line
    chat: bool = False                       # one conversation; Ctrl-C ends an answer
    num_samples: Count = 1                   # samples of the prompt
    max_new_tokens: PositiveInt = 128        # longest sample
    temperature: NonNegativeFloat = 0.8      # of sampling; 0: greedy
    top_k: PositiveInt | None = None         # sample only from the k likeliest tokens; None: all
    top_p: UnitInterval = 1.0                # fewest tokens with this total probability (GPU: at most 1,024)
    min_p: UnitInterval = 0.0                # tokens at least this fraction as likely as the likeliest
    task: str = ""                           # ask prompts as questions of this task: with its prompt form and
                                             # instruction, up to its stop text
    stop: str | None = None                  # string that ends a sample, e.g. </answer>
    system: str | None = None                # system message for a chat model; None: its default
    tokenizer: str | None = None             # for a Hugging Face folder without tokenizer.json: gpt2, bytes,
                                             # or a folder with one
    deterministic: bool = False              # samples do not depend on their number, bit for bit (see
                                             # engine/runner.py)
    seed: NonNegativeInt = 0                 # of samples
    device: str = "auto"                     # auto (cuda, mps, cpu in that order), or a name
    dtype: Literal["auto", "bf16", "fp32"] = "auto"     # precision of sampling; fp16's range is too narrow


def open_task(cfg):
    """Return the Task of --task, and if it responds a Pool that ends with the program, else None."""
    from rollouts.questions import task_errors
    from tasks._pool import Pool, load
    with task_errors():
        task = load(cfg.task)
        if task.domains:
            raise config.BadInput(f"--task={cfg.task} is several tasks: name the one whose question it is.")
        return task, Pool(cfg.task, workers=1) if task.responds else None


def make_engine(cfg, model, tokenizer, hw, task, context, slots):
    """Return an Engine. Every rank builds one, so that all ranks reject invalid input."""
    stop_strings = tuple(text for text in (cfg.stop, task and task.turn_stop) if text)
    sampling = Sampling(cfg.temperature, cfg.top_k, cfg.top_p, cfg.min_p, tuple(tokenizer.stop), stop_strings)
    return Engine(model, slots, context, sampling, seed=cfg.seed, dtype=hw.sampling_dtype, device=hw.device,
                  deterministic=cfg.deterministic, decode=tokenizer.decode, half_weights=cfg.dtype == "auto")


def question_of(cfg, task):
    """Return the question that --prompt asks, or one of the task's own."""
    if cfg.prompt or not task:
        return {"question": cfg.prompt, "answer": ""}
    from rollouts.questions import task_errors
    with task_errors():
        questions = distributed.on_main(lambda: task.questions("test", n=1000, fewer=True))
    if not questions:
        raise config.BadInput(f"The task {task.name} has no test questions: give --prompt=.")
    return random.Random(cfg.seed).choice(questions)


def environment_of(task, tokenizer, pool, question, key=0):
    """Return the Environment that answers samples of a question, whose Request has this key; None without a
    pool."""
    if pool is None:
        return None
    from rollouts.episodes import Environment
    return Environment(task, tokenizer, pool, {key: question})


def text_of(tokenizer, environment, sample, ids):
    """Return the text of a sample's ids so far; an environment's is between « and »."""
    if not environment:
        return tokenizer.text_of(ids)
    turns = environment.turns(sample, ids)
    text = "".join(f"«{text}»" if i % 2 else text for i, text in enumerate(turns))
    return f"{text}\n({sample.error})" if sample.error else text


class Printer:
    """Prints a completion while it is sampled, without characters that may still change."""

    def __init__(self, tokenizer, environment):
        self.tokenizer = tokenizer
        self.environment = environment
        self.printed = 0                     # characters
        self.ids = []                        # of the sample, so far

    def show(self, sample, ids):
        self.ids = ids
        text = text_of(self.tokenizer, self.environment, sample, ids)
        text = text.rstrip("\N{REPLACEMENT CHARACTER}")     # the last character may still lack bytes
        print(text[self.printed:], end="", flush=True)
        self.printed = max(self.printed, len(text))

    def show_progress(self, progress):
        for sample, ids in progress.in_flight():
            self.show(sample, ids)


def prompt_of(cfg, tokenizer, question, task):
    """Return the ids of a question's prompt; task: its Task, or None."""
    text = question["question"]
    if task and (cfg.system != "" if tokenizer.is_chat else not cfg.system):
        instruction = cfg.system or instruction_of(tokenizer, task, question)
        return prompt_ids(tokenizer, text, task.prompt, instruction=instruction)
    return tokenizer.prompt_ids(text, cfg.system)


def talk(cfg, model, tokenizer, hw, task, pool):
    """Print a completion for each line of standard input: an independent prompt, or with --chat the next turn
    of one conversation, whose ids are never encoded anew."""
    prompt = "> " if sys.stdin.isatty() else ""
    sys.stdin.reconfigure(errors="replace")
    engine = None
    history = []                             # ids of the conversation
    while True:
        try:
            line = input(prompt)
        except (EOFError, KeyboardInterrupt):
            return
        question = {"question": line, "answer": ""}
        printer = Printer(tokenizer, None)
        try:
            if cfg.chat and line.startswith("/"):
                history = command(cfg, line, history)
                continue
            if history:
                ids = history + tokenizer.reply_ids(line, history[-1] in tokenizer.stop)
            else:
                ids = prompt_of(cfg, tokenizer, question, task)
            environment = environment_of(task, tokenizer, pool, question, len(history))
            printer.environment = environment
            context = max(4096, 2048 + cfg.max_new_tokens)         # positions of a conversation
            engine = engine or make_engine(cfg, model, tokenizer, hw, task, context, 1)
            sampling = dataclasses.replace(engine.sampling, temperature=cfg.temperature)
            request = Request(ids, key=len(history), max_new_tokens=cfg.max_new_tokens)
            for sample in engine.generate([request], printer.show_progress, sampling, environment):
                printer.show(sample, sample.ids)
        except (ValueError, FloatingPointError, config.BadInput) as e:
            advice = " (/reset begins a new conversation)" * bool(history)
            print(f"error: {e}{advice}", file=sys.stderr, flush=True)
            continue
        except KeyboardInterrupt:            # ends this completion only
            pass
        if cfg.chat and printer.ids:
            history = ids + printer.ids
            if not tokenizer.is_chat and history[-1] in tokenizer.stop:
                history.pop()                # the text continues
        print(flush=True)


def command(cfg, line, history):
    """Obey a line of a conversation that begins with a slash. Returns the conversation's ids."""
    name, _, value = line.partition(" ")
    if name == "/reset":
        return []
    if name != "/temperature":
        raise ValueError(f"{name} is no command: /reset, or /temperature 0.7.")
    try:
        cfg.temperature = Sampling(float(value)).temperature           # which raises for other numbers
    except ValueError:
        raise ValueError(f"/temperature needs a number, such as /temperature 0.7, not {value!r}.") from None
    return history


def columns(left, right, width):
    """Return two texts side by side, in a terminal of this width."""
    half = max(20, (width - 3) // 2)
    sides = []
    for text in (left, right):
        lines = [textwrap.wrap(line, half, drop_whitespace=False) or [""] for line in text.splitlines()]
        sides.append([part for line in lines for part in line])
    return "\n".join(f"{a:{half}} | {b}".rstrip() for a, b in zip_longest(*sides, fillvalue=""))


def sample_texts(cfg, name, hw, task, pool, question):
    """Return the sampled texts of a model on all ranks, in order."""
    rank = distributed.rank()
    world = distributed.world_size()
    source = distributed.on_main(lambda: hub.find(name))
    tokenizer = source.tokenizer(cfg.tokenizer)
    if name == cfg.versus:
        memory.release()                     # of the model before
    model = source.load()                    # in CPU memory; the engine copies it to the device
    try:
        prompt = prompt_of(cfg, tokenizer, question, task)
    except ValueError as e:
        raise config.BadInput(str(e)) from None
    first = cfg.num_samples * rank // world
    count = cfg.num_samples * (rank + 1) // world - first
    slots = 64 if cfg.deterministic else max(1, min(count, 64))
    replies = 0
    if task:
        from rollouts.episodes import reply_tokens
        replies = reply_tokens(cfg, task, source.config)
    context = context_of(len(prompt), cfg.max_new_tokens, source.config.block_size, replies=replies)
    try:
        engine = make_engine(cfg, model, tokenizer, hw, task, context, slots)
        engine.check(Request(prompt))
        requests = [Request(prompt, count, 0, cfg.max_new_tokens, first)] if count else []
        environment = environment_of(task, tokenizer, pool, question)
        samples = engine.generate(requests, environment=environment)
        texts = [(sample.index, text_of(tokenizer, environment, sample, sample.ids))
                 for sample in track(samples, "sampling", "samples", count)]
    except (ValueError, FloatingPointError) as e:
        raise config.BadInput(str(e)) from None
    return [text.rstrip("\n") for _, text in sorted(sum(distributed.gather(texts), []))]


def main(argv):
    distributed.init()
    cfg = config.load(Config, argv, positional="model")
    if not cfg.model:
        raise config.BadInput("Name the model to sample from: python sample.py RUN_OR_MODEL --prompt=...")
    if cfg.versus and (cfg.interactive or cfg.chat):
        raise config.BadInput("--versus is for one prompt: leave it out, or --interactive and --chat.")
    if (cfg.interactive or cfg.chat) and (cfg.prompt or cfg.num_samples > 1 or cfg.interactive and cfg.chat):
        raise config.BadInput("--interactive and --chat read prompts from standard input, one sample each: "
                              "leave out --prompt and --num_samples, and give one of the two.")
    end_with_reader()
    task, pool = open_task(cfg) if cfg.task else (None, None)
    if task and cfg.stop is None:
        cfg.stop = task.stop
    hw = hardware.setup(cfg.device, cfg.dtype, tf32=cfg.dtype != "fp32", compile=False,
                        deterministic=cfg.deterministic)
    if cfg.interactive or cfg.chat:
        if distributed.world_size() > 1:
            raise config.BadInput("--interactive and --chat need one process: run them without torchrun.")
        source = hub.find(cfg.model)
        return talk(cfg, source.load(), source.tokenizer(cfg.tokenizer), hw, task, pool)
    question = question_of(cfg, task)
    models = [name for name in (cfg.model, cfg.versus) if name]
    texts = [sample_texts(cfg, name, hw, task, pool, question) for name in models]
    if not distributed.is_main():
        return
    if cfg.versus:
        print(question["question"])
        width = shutil.get_terminal_size().columns
        for pair in (models, *zip(*texts)):
            print(columns(*pair, width), end="\n---\n")
        return
    shown = question["question"] + "\n" if task else question["question"]
    for text in texts[0]:
        print(shown + text, end="\n---\n")


if __name__ == "__main__":
    guard.run(main)
