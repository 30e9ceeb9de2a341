"""Encode prompts, identically for sampling and fine-tuning."""
import functools
import sys

from runtime import distributed
from runtime.config import BadInput

# default prompt form for a model without a chat template; a task may define its own
PROMPT = "Question: {}\n"
# which begin a turn in chat templates
TEMPLATE_TOKENS = ("<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "[INST]")


def context_of(longest, max_new_tokens, positions, shorter="shorten it", replies=0):
    """Return the number of positions for prompt and completion, at most the model's; print a warning if fewer
    than max_new_tokens remain. longest: tokens of the longest prompt. replies: room for an environment's
    text. BadInput, ending in `shorter`, if no position remains."""
    if longest >= positions:
        raise BadInput(f"A prompt of {longest} tokens can't be continued in the {positions} positions of the "
                       f"model: {shorter}.")
    if longest + max_new_tokens > positions and distributed.is_main():
        print(f"--max_new_tokens={max_new_tokens} is more than the model's {positions} positions leave: "
              f"after a prompt of {longest} tokens an answer ends at {positions - longest}.",
              file=sys.stderr, flush=True)
    return min(positions, longest + max_new_tokens + replies)


def check_unmarked(tokenizer, text):
    """Raise ValueError if a chat template has already been applied to a prompt and would be applied again."""
    found = [token for token in TEMPLATE_TOKENS if token in text]
    if found and tokenizer.is_chat:
        raise ValueError(f"the prompt {text[:40]!r} contains {found[0]} of a chat template already applied; "
                         'give the user\'s text alone, or convert examples to {"messages"} (docs/rft.md)')


@functools.cache
def say_unseen(name, has="no chat template", place="PROMPT or train.py's --prompt"):
    """Print once that the model does not see an instruction, or a prompt's form."""
    if distributed.is_main():
        print(f"The model has {has}, so it does not see {name}: write that into {place}.", file=sys.stderr,
              flush=True)


def instruction_of(tokenizer, task, question):
    """Return the system message of a question: its own, else its task's, which may be empty. Print a line if
    the task is the user's and the model sees no INSTRUCTION, or with a chat template no PROMPT. ValueError if
    a question has a system message that the model does not see."""
    system = question.get("system")
    if system and not tokenizer.is_chat:
        raise ValueError(f"The question {question['question'][:40]!r} has a system message, and the model "
                         "has no chat template: write it into the prompt.")
    is_own = not task.module.__name__.startswith("tasks.")
    if is_own and task.instruction and not tokenizer.is_chat:
        say_unseen(f"INSTRUCTION of the task {task.name}")
    if is_own and tokenizer.is_chat and task.prompt not in (PROMPT, "{}"):
        say_unseen(f"PROMPT of the task {task.name}", "a chat template", "INSTRUCTION or the questions")
    return system or task.instruction


def prompt_ids(tokenizer, question, form=PROMPT, examples=(), instruction=""):
    """Return the list of ids of a prompt.

    question: its text. examples: (question, completion) pairs that precede it, in the same form, or as turns
    of a chat. instruction: system message that replaces the chat template's, if any; ignored without a
    template (see say_unseen).
    """
    if not tokenizer.is_chat:
        text = ""
        for example, completion in examples:
            text += form.replace("{}", example) + f"{completion}\n\n"
        return tokenizer.prompt_ids(text + form.replace("{}", question))
    check_unmarked(tokenizer, question)
    return tokenizer.prompt_ids(question, instruction or None, examples)
