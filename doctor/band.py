"""The band in which a fresh run of a recipe should lie, from the curves of three to ten seeds.

A healthy run must lie within it as a whole, all figures and all steps together, in so many cases that a ladder
of three runs lies within its bands in nine of ten. The range from the lowest to the highest seed does not do
that: a fourth run is outside that of three at every second step. Nor does a 95% interval at each step: of many
steps some are always outside. So:

1. A curve is cut into at most BLOCKS blocks of neighbouring steps, of which the means are compared. That
   takes out the noise of single steps, of which a GRPO reward is mostly made, and leaves few comparisons.
   What is always positive and falls by multiples (losses, entropy) is compared by its logarithm, in which
   the spread of seeds changes least along a run.
2. The variance between seeds is pooled over neighbouring blocks (POOLING): that of three seeds at one place
   alone is far too uncertain, and what is large early and small late in a run must not be pooled as a whole.
3. The half-width is `multiplier` times that spread. If the blocks of a run hung together wholly, that would
   be a prediction interval for one number, Student's t(n - 1) times sqrt(1 + 1/n), and it is never less;
   since they do so in part (CORRELATION), the quantile of the largest deviation anywhere on a fresh curve
   (max-t) is drawn by simulation. With three seeds the first is larger, with five the second.
4. The figures of a run share RISK evenly (Bonferroni).

tests/test_expected.py simulates it, with offsets of a seed's own, noise that lasts and noise of single steps:
of fresh runs 96 to 99.8% lie within, whatever the mixture, with three seeds and with five.
"""
import functools
import math

import numpy as np

BLOCKS = 8                                   # of a curve, at most
RISK = 0.03                                  # that a healthy run leaves the band anywhere
CORRELATION = 0.75                           # of neighbouring blocks, in the simulation
POOLING = (1, 2, 3, 2, 1)                    # weights of a block's variance and its neighbours'
DRAWS = 40_000                               # simulated sets of seeds with a fresh run each
# below which seeds agree by chance, or another machine's rounding is more: of a share, or of a logarithm
LEAST_SPREAD = 0.003
LOGARITHMIC = ("loss", "val_loss", "entropy")
SMALLEST = 1e-4                              # of which a logarithm is taken


def to_scale(key, values):
    """Return figures as they are compared; NaN stays NaN."""
    values = np.asarray(values, dtype=float)
    return np.log(np.maximum(values, SMALLEST)) if key in LOGARITHMIC else values


def from_scale(key, values):
    return np.exp(values) if key in LOGARITHMIC else values


def blocks(num_steps):
    """Return the blocks of a curve of so many logged steps, each an array of neighbouring indices; their
    lengths differ by one at most."""
    length = math.ceil(num_steps / BLOCKS)
    return np.array_split(np.arange(num_steps), math.ceil(num_steps / length))


def pooling(num_blocks):
    """Return [m, m] whose rows are the weights with which the variances of all blocks make up that of one."""
    weights = np.zeros((num_blocks, num_blocks))
    for offset, weight in enumerate(POOLING, -(len(POOLING) // 2)):
        weights += weight * np.eye(num_blocks, k=offset)
    return weights / weights.sum(1, keepdims=True)


def spread(curves):
    """Return the standard deviation between seeds at each block, [..., m], from curves [..., n, m]."""
    return np.sqrt(curves.var(-2, ddof=1) @ pooling(curves.shape[-1]).T)


@functools.cache
def multiplier(num_seeds, num_blocks, risk):
    """Return by how many times the spread of `num_seeds` curves a fresh one is away from their mean at most,
    at all blocks, but for a share `risk` of fresh curves."""
    apart = np.abs(np.subtract.outer(np.arange(num_blocks), np.arange(num_blocks)))
    root = np.linalg.cholesky(CORRELATION**apart)
    curves = np.random.default_rng(0).standard_normal((DRAWS, num_seeds + 1, num_blocks)) @ root.T
    fresh = curves[:, 0]
    seeds = curves[:, 1:]
    largest = (np.abs(fresh - seeds.mean(1)) / spread(seeds)).max(1)
    found = float(np.quantile(largest, 1 - risk))
    return max(found, multiplier(num_seeds, 1, risk)) if num_blocks > 1 else found


def band(key, steps, runs, risk=RISK):
    """Return the band of a figure, {steps: of each block, mean, low, high}, lists of m. key: the figure's in
    metrics.jsonl. steps [T], runs [n, T]: its values at them, a row a seed."""
    parts = blocks(len(steps))
    scaled = to_scale(key, runs)
    curves = np.stack([scaled[:, part].mean(1) for part in parts], 1)
    mean = curves.mean(0)
    width = multiplier(len(curves), len(parts), risk) * np.maximum(spread(curves), LEAST_SPREAD)
    return {
        "steps": [[steps[i] for i in part] for part in parts],
        "mean": rounded(from_scale(key, mean)),
        "low": rounded(from_scale(key, mean - width)),
        "high": rounded(from_scale(key, mean + width)),
    }


def bands(figures):
    """Return {figure: band} of all figures of a recipe, {figure: {steps, runs}}, which share the risk."""
    result = {}
    for key, figure in figures.items():
        result[key] = band(key, figure["steps"], figure["runs"], RISK / len(figures))
    return result


def rounded(values):
    """Return numbers to five digits, as they stand in files."""
    return [float(f"{value:.5g}") for value in values]


def departures(key, band, values):
    """Return the blocks at which a run is outside of the band of a figure, as [{figure, from, to: steps, low,
    high, value: None if it is not finite}]. values: {step: the run's}, as far as it got; a block that is not
    complete is judged only by whether its figures are finite."""
    found = []
    for steps, low, high in zip(band["steps"], band["low"], band["high"]):
        value = block_mean(key, steps, values)
        if value is not None and not low <= value <= high:
            finite = value if math.isfinite(value) else None
            found.append({"figure": key, "from": steps[0], "to": steps[-1], "low": low, "high": high,
                          "value": finite})
    return found


def block_mean(key, steps, values):
    """Return the mean of a run's figures at the steps of a block, NaN if one of them is not finite; None
    while some are still to come."""
    logged = [values[step] for step in steps if step in values]
    if not all(map(math.isfinite, logged)):
        return math.nan
    if len(logged) < len(steps):
        return None
    return float(from_scale(key, to_scale(key, logged).mean()))
