"""Guess a number from 1 to 31 in five turns: each guess is a line, and the environment answers `higher` or
`lower`. The grade is 1 for the number, and the text ends with it.

Of the documents, a third halve the interval each time, as one must; the others guess within it at random, or
without regard to the answers."""
import random

from tasks import _questions

MOST = 31
MAX_TURNS = 5
TURN_STOP = "\n"
STOP = None
INSTRUCTION = f"Guess a number from 1 to {MOST}, one guess a line. The answer is higher or lower."
WAYS = ("halves", "within", "anywhere")


def draw(rng):
    number = rng.randint(1, MOST)
    game = rng.randrange(10**6)
    return f"{game}", {"question": f"Game {game}: a number from 1 to {MOST}.", "answer": f"{number}"}


def questions(split, seed=0, n=None):
    return _questions.distinct(draw, split, seed, n)


def answer_to(question, guess):
    """Return the environment's line, None for the number itself and for what is no number."""
    if not guess.isdecimal() or int(guess[:9]) == int(question["answer"]):
        return None
    return "higher\n" if int(guess[:9]) < int(question["answer"]) else "lower\n"


def last_line(text):
    """Return the last line that is not blank: a token may end several lines."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def respond(question, text):
    return answer_to(question, last_line(text))


def play(question, rng, way):
    """Return the text of a game."""
    low, high = 1, MOST
    text = ""
    for _ in range(MAX_TURNS):
        guess = (low + high) // 2 if way == "halves" else rng.randint(low, high)
        reply = answer_to(question, f"{guess}")
        text += f"{guess}\n{reply or ''}"
        if not reply:
            break
        if way != "anywhere":
            low, high = (guess + 1, high) if reply == "higher\n" else (low, guess - 1)
    return text


def documents(split, seed=0):
    rng = random.Random(f"{seed} {split} games")
    drawn = _questions.draw_documents(draw, split, seed)
    return [_questions.document(question, play(question, rng, rng.choice(WAYS))) for question in drawn]


def solution(question):
    return play(question, None, "halves")


def reward(question, completion):
    return float(last_line(completion) == question["answer"])
