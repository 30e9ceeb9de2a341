"""Intervals for a difference over seeds and questions that hold at every look, from three to ten seeds.

A comparison has the differences d [seeds, questions] of two arms, paired by seed and by question, each of two
shares of right samples, so in [-1, 1]. They are crossed: all seeds answer the same questions, so

    d[s, q] = mean + seed[s] + question[q] + residual[s, q]

and the mean's error has two parts. The spread of the seeds' means over questions holds seed and residual. It
does not hold question, which is the same for all seeds and adds its variance over the number of questions.

Seeds are added after looking, which a t interval does not allow: it errs in 17% of experiments that stop at
the first difference from 0 among 3, 4, ..., 10 seeds. Here the error is spent over these looks, by shares
fixed beforehand (Lan and DeMets 1983, "Discrete sequential boundaries for clinical trials"): BOUNDS are the
quantiles of t at each look among the experiments that did not stop before.
"""
import math

import numpy as np

FEWEST = 3
MOST = 10
# shares of the error at 3, 4, ..., 10 seeds: more at the first looks, which most comparisons end with
SPENT = [0.3, 0.2, 0.14, 0.1, 0.08, 0.07, 0.06, 0.05]
# {confidence: (multiples of the seeds' standard error at 3, 4, ..., 10 seeds, and of the questions')}, by
# simulating ten million experiments (tests/test_compare.py), for an error of 4.8% and 0.96%. The rest is for
# the questions' part, whose variance is estimated too.
BOUNDS = {
    "95": ([8.23, 5.23, 4.33, 3.94, 3.70, 3.52, 3.40, 3.32], 2.05),
    "99": ([18.55, 9.62, 7.17, 6.14, 5.50, 5.07, 4.79, 4.62], 2.72),
}


def half_width(of_seeds, confidence="95"):
    """Return the half-width [...] of the interval of the mean of of_seeds [..., seeds]."""
    multiples, _ = BOUNDS[confidence]
    seeds = of_seeds.shape[-1]
    return multiples[seeds - FEWEST] * of_seeds.std(-1, ddof=1) / math.sqrt(seeds)


def interval(d, confidence="95"):
    """Return (mean, half-width, error of the questions), each [...], of differences d [..., seeds,
    questions]; the last is the half-width that infinitely many seeds would leave.

    Seeds that agree by chance leave at least the normal interval of the residual alone, which includes one
    more difference of a whole question, so that no interval has the width zero."""
    seeds, questions = d.shape[-2:]
    of_seeds = d.mean(-1)
    of_questions = d.mean(-2)
    mean = of_seeds.mean(-1)
    rest = d - of_seeds[..., None] - of_questions[..., None, :] + mean[..., None, None]
    residual = (np.square(rest).sum((-2, -1)) + 1) / ((seeds - 1) * (questions - 1))
    question = np.maximum(of_questions.var(-1, ddof=1) - residual / seeds, 0)
    _, z = BOUNDS[confidence]
    from_seeds = np.maximum(half_width(of_seeds, confidence), z * np.sqrt(residual / questions / seeds))
    from_questions = z * np.sqrt(question / questions)
    return mean, np.hypot(from_seeds, from_questions), from_questions


def comparison(d, confidence="95"):
    """Return the figures of differences d [seeds, questions]: verdict (better, worse or tie), difference,
    low, high, from_questions (see interval), by_seed, seeds, questions."""
    mean, half, from_questions = interval(d, confidence)
    return {
        "verdict": "better" if mean > half else "worse" if mean < -half else "tie",
        "difference": float(mean),
        "low": float(mean - half),
        "high": float(mean + half),
        "from_questions": float(from_questions),
        "by_seed": d.mean(1).tolist(),
        "seeds": len(d),
        "questions": d.shape[1],
    }


def more_seeds(figures, width, confidence="95"):
    """Return the number of further seeds that would bring the half-width of a comparison to `width`, if the
    variances stay as they are; None if ten seeds would not."""
    half = (figures["high"] - figures["low"]) / 2
    seeds = figures["seeds"]
    multiples, _ = BOUNDS[confidence]
    from_seeds = math.sqrt(max(half**2 - figures["from_questions"]**2, 0))
    for n in range(seeds, MOST + 1):
        then = from_seeds * multiples[n - FEWEST] / multiples[seeds - FEWEST] * math.sqrt(seeds / n)
        if math.hypot(then, figures["from_questions"]) <= width:
            return n - seeds
    return None


def points(figures, unit=""):
    """Return a comparison as text in points, "+4.0 [+1.0, +7.0]"."""
    middle, low, high = (100 * figures[key] for key in ("difference", "low", "high"))
    return f"{middle:+.1f}{unit} [{low:+.1f}, {high:+.1f}]"


def sentence(name, reference, figures, resolve, confidence):
    """Return a comparison in one sentence. resolve: points that a tie should be narrowed to."""
    cell = points(figures, " points")
    if figures["verdict"] != "tie":
        return f"{name} is {figures['verdict']} than {reference}: {cell}."
    within = 100 * max(-figures["low"], figures["high"])
    text = f"{name} and {reference} are a tie: the difference is within ±{within:.1f} points, {cell}"
    more = more_seeds(figures, resolve / 100, confidence)
    if more == 0:
        return f"{text}."
    need = f"{more} more seed{'s' * (more > 1)} would" if more else f"{MOST} seeds would not"
    return f"{text}; {need} resolve {resolve:g} points."
