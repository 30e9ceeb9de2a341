"""What grades say of a model: the share of right answers with its confidence interval, pass@k, and the
difference of two models."""
import math
from statistics import fmean

# of a normal distribution, 95% lies within so many standard deviations
Z = 1.959963984540054


def accuracy(grades):
    """Summarise Grades [n_questions][num_samples]. A sample is right if its score is 1.

    Returns figures in [0, 1], but for the last three. accuracy: mean over questions of the share of right
    samples, from accuracy_low to accuracy_high with 95% confidence; pass_at_k: {str(k): chance that one of k
    samples is right} for k = 1, 2, 4, ..., num_samples; parts: {name: share of samples for which it is true};
    answer_rate: that of the part "answered", None without; verified: share of samples fit for training;
    questions, samples, errors: their numbers.
    """
    samples = [grade for row in grades for grade in row]
    names = dict.fromkeys(name for grade in samples for name in grade.parts)
    parts = {name: fmean(bool(grade.parts.get(name)) for grade in samples) for name in names}
    shares = right(grades)
    low, high = interval(shares, len(samples) / len(grades))
    fewest = min(map(len, grades))
    ks = sorted({2**i for i in range(fewest.bit_length())} | {fewest})
    return {
        "accuracy": fmean(shares),
        "accuracy_low": low,
        "accuracy_high": high,
        "answer_rate": parts.get("answered"),
        "pass_at_k": {str(k): fmean(pass_at(k, len(row), n_right(row)) for row in grades) for k in ks},
        "parts": parts,
        "verified": fmean(grade.verified for grade in samples),
        "questions": len(grades),
        "samples": len(samples),
        "errors": sum(grade.error is not None for grade in samples),
    }


def by_domain(task, questions, grades):
    """Return {task's name: the Grades [n][num_samples] of its questions}: of a mixture for each of its tasks
    that was asked."""
    found = {}
    for question, row in zip(questions, grades, strict=True):
        found.setdefault(task.of(question).name, []).append(row)
    return found


def macro(figures, name="accuracy"):
    """Return the mean of several tasks' figures, {name, name_low, name_high}, each task counting alike.

    The widths of independent intervals add up as the sides of a triangle do, those below the figures and those
    above each by themselves (Zou and Donner 2008), so that the mean's stays within 0 and 1 if theirs do."""
    figures = list(figures)
    mean = fmean(f[name] for f in figures)
    # An end at the figure itself may be past it by its rounding.
    below = math.hypot(*(max(0.0, f[name] - f[f"{name}_low"]) for f in figures)) / len(figures)
    above = math.hypot(*(max(0.0, f[f"{name}_high"] - f[name]) for f in figures)) / len(figures)
    return {name: mean, f"{name}_low": mean - below, f"{name}_high": mean + above}


def n_right(grades):
    """Count the samples that are right."""
    return sum(grade.score == 1 for grade in grades)


def right(grades):
    """Return, for each question, the share of its samples that are right."""
    return [n_right(row) / len(row) for row in grades]


def pass_at(k, n, right):
    """Estimate the chance that one of k samples is right from n of which so many are, without bias (Chen et
    al. 2021)."""
    return 1 - math.comb(n - right, k) / math.comb(n, k)


def interval(shares, num_samples):
    """Return (low, high) that hold the mean of questions' shares of right samples with 95% confidence.

    Wilson's interval (1927) for as many independent answers as would have its standard error. These are the
    questions if samples of one are right or wrong together, or if there is one each; at most they are the
    samples. The standard error is taken with one more question, half of it right. At one sample each that
    changes nothing; without it, where few samples are right, as few as 85% of intervals hold the truth
    (simulated).
    """
    n = len(shares)
    p = fmean(shares)
    around = (n * p + 0.5) / (n + 1)
    squares = (sum(x * x for x in shares) + 0.5) / (n + 1)
    n /= max((squares - around**2) / (around * (1 - around)), 1 / num_samples)
    middle = p + Z**2 / (2 * n)
    half = Z * math.sqrt(p * (1 - p) / n + (Z / (2 * n))**2)
    low = (middle - half) / (1 + Z**2 / n)
    high = (middle + half) / (1 + Z**2 / n)
    # Rounding may put an end on the wrong side of p where all shares are 0, or 1.
    return max(0.0, min(p, low)), min(1.0, max(p, high))


def difference(a, b):
    """Return how much more accurate b is than a, Grades on the same questions: {difference, difference_low,
    difference_high}.

    Compared question by question, so what is hard for both does not count. The 95% interval has one more
    question, half of it gained and half lost (after Bonett and Price 2012, who add two), or ten questions
    without a difference would prove that there is none.
    """
    gains = [y - x for x, y in zip(right(a), right(b), strict=True)]
    n = len(gains) + 1
    middle = sum(gains) / n
    half = Z * math.sqrt(((sum(x * x for x in gains) + 1) / n - middle**2) / n)
    return {
        "difference": fmean(gains),
        "difference_low": max(-1.0, middle - half),
        "difference_high": min(1.0, middle + half),
    }
