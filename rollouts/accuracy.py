"""Statistics of grades: accuracy with an interval, pass@k, and the difference between two models."""
import math
from statistics import fmean

Z = 1.959963984540054                        # standard deviations that contain 95% of a normal distribution


def accuracy(grades):
    """Summarise Grades [n_questions][num_samples]. A sample is right if its score is 1.

    Returns figures in [0, 1] and three counts. accuracy: mean over questions of the share of right samples,
    with 95% interval accuracy_low to accuracy_high; pass_at_k: {str(k): probability that at least one of k
    samples is right} for k = 1, 2, 4, ..., num_samples; parts: {name: share of samples for which it holds,
    of those that have it}; answer_rate: the share of the part "answered", or None; verified: share of samples
    fit for training; questions, samples, errors: counts.
    """
    samples = [grade for row in grades for grade in row]
    names = dict.fromkeys(name for grade in samples for name in grade.parts)
    parts = {}
    for name in names:                       # of a mixture not every task has it
        parts[name] = fmean(bool(g.parts.get(name)) for g in samples if name in g.parts or g.error)
    shares = right_shares(grades)
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


def mean_score(grades, name="mean_score"):
    """Return the mean score of Grades [n_questions][num_samples] with its 95% interval, {name, name_low,
    name_high}; of no question, 0 with a wide one. An answer that could not be graded has the score 0.

    The samples of a question depend on each other, so their mean counts as one observation (a cluster-robust
    standard error: Miller 2024, "Adding Error Bars to Evals"). Scores lie in [0, 1], so Wilson's
    interval at the effective sample size of `interval` holds for any of them (simulated coverage 0.94 to 1);
    scores of 0 and 1 alone have the accuracy's.
    """
    means = [fmean(grade.score for grade in row) for row in grades] or [0.0]
    num_samples = math.inf if partly_right(grades) else sum(map(len, grades)) / len(means)
    low, high = interval(means, max(1, num_samples))
    return {name: fmean(means), f"{name}_low": low, f"{name}_high": high}


def partly_right(grades):
    """Tell whether any score is neither 0 nor 1."""
    return any(grade.score not in (0, 1) for row in grades for grade in row)


def by_domain(task, questions, grades):
    """Return {task name: Grades [n][num_samples] of its questions} for each task of a mixture with
    questions."""
    domains = {}
    for question, row in zip(questions, grades, strict=True):
        domains.setdefault(task.of(question).name, []).append(row)
    return domains


def macro(figures, name="accuracy"):
    """Return the unweighted mean over tasks of a figure, {name, name_low, name_high}.

    Independent intervals combine as the root of summed squares of their lower widths, and likewise of their
    upper widths (Zou and Donner 2008), so the mean's interval stays within [0, 1] if theirs do."""
    figures = list(figures)
    mean = fmean(f[name] for f in figures)
    # max: rounding may put an end on the wrong side of its figure
    below = math.hypot(*(max(0.0, f[name] - f[f"{name}_low"]) for f in figures)) / len(figures)
    above = math.hypot(*(max(0.0, f[f"{name}_high"] - f[name]) for f in figures)) / len(figures)
    return {name: mean, f"{name}_low": mean - below, f"{name}_high": mean + above}


def n_right(grades):
    """Return the number of right samples."""
    return sum(grade.score == 1 for grade in grades)


def right_shares(grades):
    """Return the share of right samples of each question."""
    return [n_right(row) / len(row) for row in grades]


def pass_at(k, n, right):
    """Estimate, without bias, the probability that at least one of k samples is right, given that `right` of
    n were (Chen et al. 2021)."""
    return 1 - math.comb(n - right, k) / math.comb(n, k)


def interval(shares, num_samples):
    """Return a 95% interval (low, high) for the mean of the questions' shares of right samples, or of their
    mean scores in [0, 1] (num_samples = inf).

    Wilson's interval (1927) at the effective sample size: the number of independent answers that would have
    the same standard error. It is the number of questions if a question's samples agree or there is one each,
    and at most num_samples. The standard error includes one more question, half right: at one sample each
    this changes nothing; without it, when few samples are right, coverage falls to 85% (simulated).
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
    # max, min: if all shares are 0 or 1, rounding may put an end on the wrong side of p
    return max(0.0, min(p, low)), min(1.0, max(p, high))


def difference(a, b):
    """Return the accuracy of Grades b minus that of a, on the same questions: {difference, difference_low,
    difference_high}.

    The comparison is paired, so questions that are hard for both add no variance. The 95% interval includes
    one more question, half gained and half lost (after Bonett and Price 2012, who add two); without it, ten
    questions with equal results would give an interval of width zero.
    """
    gains = [y - x for x, y in zip(right_shares(a), right_shares(b), strict=True)]
    n = len(gains) + 1
    middle = sum(gains) / n
    half = Z * math.sqrt(((sum(x * x for x in gains) + 1) / n - middle**2) / n)
    return {
        "difference": fmean(gains),
        "difference_low": max(-1.0, middle - half),
        "difference_high": min(1.0, middle + half),
    }
