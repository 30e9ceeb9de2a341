"""Compare greedy completions with llama.cpp's, id by id, and time both. FOLDER is where
`npm install node-llama-cpp` was run; the GGUF file is MODEL's (docs/models.md).

    python -m studies.llama_cpp MODEL FILE.gguf FOLDER --rows=20
"""
import json
import os
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

import hub
import tasks
from engine import Engine, Request, Sampling
from rollouts.pipeline import requests_of
from rollouts.questions import questions_of
from runtime import config, guard
from runtime.config import BadInput, PositiveInt


@dataclass
class Config:
    paths: tuple = ()                        # model, GGUF file, folder of node-llama-cpp
    num_questions: PositiveInt = 50          # of unit_conversion's test questions
    max_new_tokens: PositiveInt = 60
    rows: PositiveInt = 1                    # sequences in flight
    threads: PositiveInt = 1


def main(argv):
    cfg = config.load(Config, argv, positional="paths")
    if len(cfg.paths) != 3:
        raise BadInput("Three paths are needed: MODEL FILE.gguf FOLDER.")
    model, gguf, node = cfg.paths
    torch.set_num_threads(cfg.threads)
    source = hub.find(model)
    tokenizer = source.tokenizer()
    task = tasks.load("unit_conversion")
    questions = questions_of(task, "test", cfg.num_questions)
    prompts = [request.ids for request in requests_of(tokenizer, task, questions)]
    context = max(map(len, prompts)) + cfg.max_new_tokens
    greedy = Sampling(temperature=0, stop=tokenizer.stop)
    engine = Engine(source.load(), cfg.rows, context, greedy, half_weights=True)
    began = time.perf_counter()
    samples = engine.generate([Request(ids, 1, i, cfg.max_new_tokens) for i, ids in enumerate(prompts)])
    ours = {sample.request.key: sample.ids for sample in samples}
    seconds = time.perf_counter() - began
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(prompts, file)
        file.flush()
        numbers = map(str, (cfg.max_new_tokens, cfg.rows, cfg.threads))
        command = ["node", "--input-type=module", "-", Path(gguf).resolve(), file.name, *numbers]
        with open(Path(__file__).with_suffix(".mjs")) as script:
            done = subprocess.run(command, cwd=node, stdin=script, capture_output=True, text=True)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:]
        raise BadInput(f"llama.cpp failed ({reason}): check {gguf}, or run `npm install node-llama-cpp` in "
                       f"{node}.")
    theirs = json.loads(done.stdout.splitlines()[-1])
    pairs = [(ours[i], ids) for i, ids in enumerate(theirs["ids"])]
    for name, ids, taken in (("here", [a for a, _ in pairs], seconds),
                             ("llama.cpp", [b for _, b in pairs], theirs["seconds"])):
        tokens = sum(map(len, ids))
        print(f"{name}: {tokens:,} tokens in {taken:.1f} s, {tokens / taken:.1f} tokens/s")
    common = [len(os.path.commonprefix(pair)) for pair in pairs]
    equal = sum(a == b for a, b in pairs)
    print(f"{equal} of {len(pairs)} completions are equal; of {tokens / len(pairs):.1f} tokens the first "
          f"{sum(common) / len(pairs):.1f} are, on average")
    return 0


if __name__ == "__main__":
    guard.run(main)
