"""Facts about a run's data for the doctor: repeated rows, trained rows in validation, answers in prompts."""
import re

import numpy as np

TOKENS = 2**18                       # of each split of a text that are read
PROMPTS = 2000                       # that are searched for their answer


def facts_of(train, held_out, pairs, unit):
    """Return the facts. train, held_out: rows, hashable; pairs: [(prompt, answer)] of training rows; unit:
    the rows' name."""
    known = {*train}
    pairs = [(prompt, str(answer).strip()) for prompt, answer in pairs[:PROMPTS]]
    others = [next((other for _, other in pairs[i + 1:i + 20] + pairs[:20] if other != answer), "")
              for i, (_, answer) in enumerate(pairs)]
    numbers = {(prompt, float(answer)) for prompt, answer in pairs if re.fullmatch(r"-?\d+(\.\d+)?", answer)}
    return {
        "unit": unit,
        "rows": len(train),
        "distinct_rows": len(known),
        "held_out_trained": sum(row in known for row in held_out) / max(1, len(held_out)),
        "distinct_answers": len({answer for _, answer in pairs}),
        "empty_answers": sum(answer == "" for _, answer in pairs) / max(1, len(pairs)),
        "prompts_with_answer": sum(map(gives_answer, pairs, others)) / max(1, len(pairs)),
        "conflicting": (len(numbers) - len({prompt for prompt, _ in numbers})) / max(1, len(numbers)),
    }


def facts_of_examples(train, held_out, tokenizer):
    """Return the facts of two lists of examples.Example."""
    rows, others = ([(" ".join(example.question.split()), example.ids[example.is_target].tobytes())
                     for example in split] for split in (train, held_out or []))
    pairs = []
    for example in train[:PROMPTS]:
        target = tokenizer.text_of(example.ids[example.is_target].tolist()).strip()
        tagged = re.findall("<answer>(.*?)</answer>", target, re.DOTALL)
        pairs.append((example.question, tagged[-1] if tagged else target))
    targets = sum(bool(example.is_target[0]) and example.question != "" for example in train)
    return facts_of(rows, others, pairs, "examples") | {
        "distinct_answers": len({target for _, target in rows}), "prompt_targets": targets / len(train)}


def facts_of_text(train, held_out, tokenizer):
    """Return the facts of two data.TokenFiles. Rows are documents, or lines if there are few documents."""
    splits = []
    for split in (train, held_out):
        ids = split[:TOKENS]
        documents = np.split(ids, np.flatnonzero(ids == tokenizer.eos) + 1)
        splits.append([document.tobytes() for document in documents[:-1]])
    unit = "documents"
    if min(map(len, splits)) < 20:
        splits = [tokenizer.decode(split[:TOKENS]).split("\n") for split in (train, held_out)]
        splits = [[line for line in lines if line.strip()] for lines in splits]
        unit = "lines"
    return facts_of(*splits, [], unit)


def gives_answer(pair, other):
    """Tell whether a prompt contains its answer, and not another row's too, as in `Answer yes or no`."""
    prompt, answer = pair
    return is_given(prompt, answer) and not is_given(prompt, other)


def is_given(prompt, answer):
    """Tell whether a prompt contains an answer of ten characters or more, or a shorter one right after
    "answer", "solution", "hint", "correct", "so" or "equals"."""
    if not answer or answer not in prompt:
        return False
    before = r"(?i)\b(answer|solution|hint|correct|so|equals)\b\W+(\w+\W+){0,2}"
    return len(answer) >= 10 or bool(re.search(rf"{before}{re.escape(answer)}(?!\w)", prompt))
