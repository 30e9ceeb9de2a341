"""The ids that a question is asked with: the same wherever a model is sampled, and those that fine-tuning
puts before an answer."""
import sys

from runtime import distributed
from runtime.config import BadInput

# how a question is put to a model without a chat template; a task may have a form of its own
PROMPT = "Question: {}\n"
MARKS = ("<|im_start|>", "<|start_header_id|>", "[INST]")        # of chat templates


def context_of(longest, max_new_tokens, positions, shorter="shorten it"):
    """Return the tokens of a prompt and of the answer after it, at most the model's positions: where that
    leaves less than max_new_tokens, a line says so. longest: of the prompt. BadInput, which ends in
    `shorter`, if no answer has room."""
    if longest >= positions:
        raise BadInput(f"A prompt of {longest} tokens can't be continued in the {positions} positions of the "
                       f"model: {shorter}.")
    if longest + max_new_tokens > positions and distributed.is_main():
        print(f"--max_new_tokens={max_new_tokens} is more than the model's {positions} positions leave: "
              f"after a prompt of {longest} tokens an answer ends at {positions - longest}.",
              file=sys.stderr, flush=True)
    return min(positions, longest + max_new_tokens)


def check_unmarked(tokenizer, text):
    """ValueError for a prompt that a chat template has been applied to, where one would be applied again."""
    marks = [mark for mark in MARKS if mark in text]
    if marks and tokenizer.template["name"] != "plain":
        raise ValueError(f"the prompt {text[:40]!r} holds {marks[0]}, so a chat template has been applied to "
                         "it, and the model's would be applied again; give the user's text alone, or convert "
                         'examples to {"messages"} as docs/rft.md shows')


def prompt_ids(tokenizer, question, form=PROMPT, examples=(), instruction=None):
    """Return the list of the ids after which the answer begins.

    question: its text. examples: (question, completion) pairs that stand before it, in the same form, or in a
    chat as turns. instruction: a chat's system message in place of its own; a model without a chat template
    does not see it.
    """
    if tokenizer.template["name"] == "plain":
        text = ""
        for example, completion in examples:
            text += form.replace("{}", example) + f"{completion}\n\n"
        return tokenizer.prompt_ids(text + form.replace("{}", question))
    check_unmarked(tokenizer, question)
    return tokenizer.prompt_ids(question, instruction, examples)
