"""Episodes: a task with respond() answers when the model ends a turn, and the sample goes on behind its text.

An episode is one sample of the engine. Its ids are those that were sampled and forced, never encoded anew;
`forced` tells which ones the environment wrote, and these are not trained on.
"""
from concurrent.futures import FIRST_COMPLETED, wait as wait_for

from tasks._pool import Grade


def reply_tokens(cfg, task):
    """Return the room for an environment's text in tokens: as much as for the model's."""
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
        self.texts = {}                      # {(key, index): texts of the environment}
        self.errors = {}                     # {(key, index): the failure that ended it}

    def ask(self, sample):
        """Ask for a reply to a sample that stopped. Returns False if the episode has ended."""
        name = sample.request.key, sample.index
        question = self.questions[sample.request.key]
        task = self.task.of(question)
        if not sample.forced:                # perhaps sampled again, after the engine was out of memory
            self.texts[name] = []
        turns = self.turns(sample, sample.ids)
        if not task.responds or len(sample.forced) + 1 >= task.max_turns or task.stop and task.stop in turns[-1]:
            return False
        self.waiting[self.pool.respond(question, self.text(turns))] = sample
        return True

    def replies(self, wait):
        """Return [(Sample, ids to put behind it, or None: it has ended)] of the replies since the last call.
        wait: for at least one."""
        if wait:
            wait_for(self.waiting, return_when=FIRST_COMPLETED)
        ready = [future for future in self.waiting if future.done()]
        return [self.reply(self.waiting.pop(future), self.pool.take(future)) for future in ready]

    def reply(self, sample, reply):
        name = sample.request.key, sample.index
        if reply.error:
            self.errors[name] = reply.error
        if reply.text is None:
            return sample, None
        self.texts[name].append(reply.text)
        return sample, self.tokenizer.reply_ids(reply.text, sample.ids[-1] in self.tokenizer.stop)

    def finish(self, sample, completion):
        """Give a Completion the turns and the text of its sample, and an error as its grade if there is one."""
        name = sample.request.key, sample.index
        completion.forced = sample.forced
        completion.turns = self.turns(sample, sample.ids)
        completion.text = self.text(completion.turns)
        if name in self.errors:
            completion.grade = Grade(0.0, {}, "", self.errors.pop(name))
        self.texts.pop(name, None)

    def turns(self, sample, ids):
        """Return the texts of a sample with these ids so far: the model's and the environment's in turn, the
        model's first and last."""
        texts = []
        first = 0
        for span, text in zip(sample.forced, self.texts.get((sample.request.key, sample.index), ())):
            texts += [self.tokenizer.text_of(ids[first:span[0]]), text]
            first = span[1]
        return [*texts, self.task.cut(self.tokenizer.text_of(ids[first:]))]

    def text(self, turns):
        """Return the text of an episode; a chat's turns are lines."""
        return ("\n" if self.tokenizer.is_chat else "").join(turns)
