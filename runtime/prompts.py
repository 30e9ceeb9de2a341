"""The ids that a question is asked with: the same wherever a model is sampled, and those that fine-tuning puts before an answer."""

PROMPT = "Question: {}\n"            # how a question is put to a model without a chat template; a task may have a form of its own


def prompt_ids(tokenizer, question, form=PROMPT, examples=(), instruction=None):
    """List of the ids after which the answer begins.

    question: its text. examples: (question, completion) pairs that stand before it, in the same form, or in a chat as turns.
    instruction: a chat's system message in place of its own; a model without a chat template does not see it.
    """
    if tokenizer.template["name"] == "plain":
        shown = "".join(f"{form.replace('{}', q)}{completion}\n\n" for q, completion in examples)
        return tokenizer.prompt_ids(shown + form.replace("{}", question))
    return tokenizer.prompt_ids(question, instruction, examples)
