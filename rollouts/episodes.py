"""Episodes: a task with respond() answers when the model ends a turn, and the sample goes on behind its text.

An episode is one sample of the engine. Its ids are those that were sampled and forced, never encoded anew;
`forced` tells which ones the environment wrote, and these are not trained on.
"""
from concurrent.futures import FIRST_COMPLETED, wait as wait_for

from runtime.config import BadInput
from tasks._pool import Grade
from text.examples import parts_of_ids


def reply_tokens(cfg, task, shape):
    """Return the room for an environment's text in tokens: as much as for the model's. BadInput if a model of
    this shape (a GPTConfig) can't go on behind it."""
    if task.responds and shape.mixer != "softmax":
        raise BadInput(f"A model with mixer={shape.mixer} can't continue after an environment's text: "
                       "choose a task without respond(), or a model with mixer=softmax.")
    return cfg.max_new_tokens if task.responds else 0


class Environment:
    """Answers an Engine's samples in the reward workers, while other samples run on.

    questions: indexed by a request's key. pool: a tasks._pool.Pool.
    """

    def __init__(self, task, tokenizer, pool, questions):
        self.task = task
        self.tokenizer = tokenizer
        self.pool = pool
        self.questions = questions
        self.waiting = {}                    # {Future: Sample}

    def ask(self, sample):
        """Ask for a reply to a sample that stopped. Returns False if the episode has ended."""
        question = self.questions[sample.request.key]
        task = self.task.of(question)
        turns = self.turns(sample, sample.ids)
        is_last = len(sample.forced) + 1 == task.max_turns
        at_stop = bool(task.stop) and task.stop in turns[-1]
        if is_last or at_stop or not task.responds:
            return False
        # Characters behind TURN_STOP that share its last token are no part of the call.
        turns[::2] = map(task.cut_turn, turns[::2])
        self.waiting[self.pool.respond(question, self.text(turns))] = sample
        return True

    def replies(self, wait):
        """Return [(Sample, ids to put behind it, or None: it has ended)] of the replies since the last call.
        wait: for at least one."""
        if wait:
            wait_for(self.waiting, return_when=FIRST_COMPLETED)
        found = []
        for future in [future for future in self.waiting if future.done()]:
            sample = self.waiting.pop(future)
            text, sample.error = self.pool.take(future)
            ids = None
            if text is not None:
                sample.replies.append(text)
                ids = self.tokenizer.reply_ids(text, sample.ids[-1] in self.tokenizer.stop)
            found.append((sample, ids))
        return found

    def finish(self, sample, completion):
        """Give a Completion the turns and the text of its sample; an error becomes its grade."""
        completion.forced = sample.forced
        completion.turns = self.turns(sample, sample.ids)
        completion.text = self.text(completion.turns)
        if sample.error:
            completion.grade = Grade(0.0, {}, "", sample.error)

    def turns(self, sample, ids):
        """Return the texts of a sample with these ids so far: the model's and the environment's in turn, the
        model's first and last."""
        parts = parts_of_ids(ids, sample.forced)
        own = [self.tokenizer.text_of(part) for part, is_own in parts if is_own]
        own[-1] = self.task.cut(own[-1])
        turns = own[:1]
        for reply, text in zip(sample.replies, own[1:]):
            turns += [reply, text]
        return turns

    def text(self, turns):
        """Return the text of an episode; a chat's turns are separated by line breaks."""
        return ("\n" if self.tokenizer.is_chat else "").join(turns)
