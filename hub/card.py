"""The README.md of an exported run, which the Hugging Face hub shows as its model card."""
import shlex

from runtime import config
from runtime.log import read_lines

FIGURES = {
    "val_accuracy": "share of right greedy answers to held-out questions",
    "val_accuracy_low": "the same, lower end of its 95% interval",
    "val_accuracy_high": "the same, upper end",
    "val_loss": "validation loss, nats a token",
    "val_ppl_token": "validation perplexity, a token",
    "reward": "mean reward of this step's samples in training",
}
SHOWN = ("init_from", "dataset", "task", "max_steps", "num_epochs", "learning_rate", "lora_rank", "seed")


def model_card(source, n_params):
    """Return the Markdown of a run's ModelSource: its command, and its figures at the exported step."""
    options = config.read_saved(source.folder)
    lines = read_lines(source.folder)
    if options.get("init_from") == "resume":     # the first start has the model that the run began with
        began = next((line["config"] for line in lines if "config" in line), {})
        options |= {"init_from": began.get("init_from")}
    script = "grpo.py" if "k_samples" in options else "train.py"
    given = {name: options[name] for name in SHOWN if options.get(name) not in (None, 0, "", "resume")}
    command = shlex.join(["python", script, *(f"--{name}={value}" for name, value in given.items())])
    measured = {}
    for line in lines:
        if line["step"] == source.step:          # of a loss that is not finite the log has a text
            measured |= {name: value for name, value in line.items()
                         if name in FIGURES and isinstance(value, int | float)}
    rows = [f"| {FIGURES[name]} | {value:.3f} |\n" for name, value in measured.items()]
    table = "".join(["\n| figure | value |\n|---|---|\n", *rows] if rows else [])
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [nanorft]
---

# {source.folder.resolve().name}

{n_params:,} parameters, step {source.step} of nanoRFT's `{script}`:

    {command}

To be added, since the run does not know it: the licence of its data and of the model that it began with.
{table}"""
