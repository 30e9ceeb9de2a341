"""GSM8K in the form of verl's examples, for figures that can be compared with theirs: their prompt without
worked examples, and the last number after #### as the answer; nothing else is graded. The questions and the
argument are gsm8k's."""
import re

from tasks import _equations, gsm8k

ASK = 'Let\'s think step by step and output the final answer after "####".'    # behind each question
PROMPT = "{}\n"
STOP = ""                            # the model ends its answer
ANSWER = re.compile(r"#### (-?[0-9.,]{1,40})")
READ = 300                           # verl reads the last characters of a completion

check = gsm8k.check


def questions(split, seed=0, n=None, argument=None):
    asked = gsm8k.questions(split, seed, n, argument)
    return [question | {"question": f"{question['question']} {ASK}"} for question in asked]


def solution(question):
    return f"{_equations.NOTE.sub('', question['worked'])}\n#### {question['answer']}"


def documents(split, argument=None):
    return [f"{PROMPT.format(q['question'])}{solution(q)}\n" for q in questions(split, argument=argument)]


def reward(question, completion):
    """Grade as verl does: `#### 18.0` is not `#### 18`."""
    found = ANSWER.findall(completion[-READ:])
    return float(bool(found) and found[-1].replace(",", "") == str(gsm8k.with_number(question)["answer"]))
