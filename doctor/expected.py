"""Says whether a run's curves lie where those of its recipe should: in the band that seeds of it span.

    python -m doctor.expected out/quickstart/grpo
    python -m doctor.expected out/a out/b --json
    python -m doctor.expected out/mine --recipe=quickstart_grpo

A run that was cut short, or goes on, is judged as far as it got. Exit code 0: within, or there is no band for
such a run; 3: a run left its band; 2: bad input.

A band is a file expected/bands/NAME.json, which studies/bands.py writes from real runs:

    what, commands, machine, date, commit    where it comes from
    stage           train.py or grpo.py
    starts_from     the NAME of the recipe whose model it begins with, or null
    knobs           those that the training depends on, see `knobs_of`
    val_tokens      tokens of the validation text, by which a text is known again; or null
    seeds           [n]
    figures         {figure of metrics.jsonl: {steps: [T], runs: [n][T], a row a seed}}
    band            {figure: {steps: [m][of a block], mean, low, high: [m]}}, as doctor/band.py computes it
                    from the figures; it is recomputed for a run that logs at other steps
    fresh           {seed: figures, as above}: of runs that are no part of the band and were held against it

Knobs, as --key=value:
"""
import json
from dataclasses import dataclass
from pathlib import Path

from doctor import band
from runtime import config, guard
from runtime.config import BadInput, read_json
from runtime.metrics import read_run

FOLDER = Path(__file__).parent.parent / "expected" / "bands"
LEFT = 3                                     # the exit code
FIGURES = {
    "train.py": ("loss", "val_loss"),
    "grpo.py": ("reward", "val_accuracy", "entropy"),
}
# Knobs that a curve does not depend on, or by no more than rounding: of the folder, the machine, the log. The
# seed is what a band is about; batch_size and init_from are looked at in another way.
BESIDE = set(
    "out_dir data_dir init_from resume overwrite eval_only seed batch_size gradient_accumulation_steps "
    "device dtype tf32 compile compile_mode attention cuda_graphs gradient_checkpointing loss_chunks "
    "parallel sum_locally step_timeout deterministic fused_adamw keep_memory num_workers pin_memory prefetch "
    "slots tokens_per_micro_batch offload_reference surgery_buffers reward_workers reward_pool timeout "
    "eval_interval shown_questions log_interval save_interval keep_last save_only_model tensorboard wandb "
    "diagnose".split())


@dataclass
class Config:
    runs: tuple = ()                         # run folders; usually without --runs=
    recipe: str | None = None                # a NAME of expected/bands; None: the one with the run's knobs
    json: bool = False                       # one object a run instead of a sentence


# --- runs and recipes ---

@dataclass
class Logged:
    """A run: its folder, its knobs as config.json has them, and the lines of metrics.jsonl."""
    folder: Path
    saved: dict
    lines: list

    @property
    def stage(self):
        return "grpo.py" if "k_samples" in self.saved else "train.py"

    @property
    def last_step(self):
        return max(line["step"] for line in self.lines if "step" in line)


def open_run(folder):
    """Return what a run has logged so far; BadInput if the folder is not a run's."""
    saved = config.read_saved(folder)
    lines = read_run(folder)
    if saved.get("init_from") == "resume":   # what it began with stands where its log begins
        first = next((line["config"] for line in lines if "config" in line), {})
        saved = saved | {"init_from": first.get("init_from", "resume")}
    return Logged(Path(folder), saved, lines)


def recipes():
    """Return {name: content} of the bands that there are."""
    return {path.stem: read_json(path, "restore it") for path in sorted(FOLDER.glob("*.json"))}


def series(run, key):
    """Return {step: a run's figure}; what is not finite stands in metrics.jsonl as text."""
    values = {}
    for line in run.lines:
        value = line.get(key)
        if isinstance(value, int | float) or value in ("nan", "inf", "-inf"):
            values[line["step"]] = float(value)
    return values


def val_tokens(run):
    """Return how many tokens the validation text has, as evaluations count them; None without one."""
    return next((line["val_tokens"] for line in run.lines if "val_tokens" in line), None)


def knobs_of(saved):
    """Return the knobs that a run's curves depend on, with the sequences of a step for how they are cut."""
    knobs = {name: value for name, value in saved.items() if name not in BESIDE}
    if "batch_size" in saved:
        knobs["sequences"] = saved["batch_size"] * saved["gradient_accumulation_steps"]
    return knobs


def start_of(run):
    """Return the Logged run whose model this one began with, if its folder is still there, else None."""
    start = Path(run.saved.get("init_from") or "scratch")
    for folder in (start, run.folder.parent / start.name):
        try:
            return open_run(folder)
        except BadInput:
            continue
    return None


def same_dataset(run, recipe):
    """Tell whether a run learns from the recipe's data: text files by the size of what is held out, whatever
    their name, and before an evaluation by their name."""
    here = run.saved["dataset"]
    there = recipe["knobs"]["dataset"]
    if None in (here, there) or "task:" in here + there:
        return here == there
    if val_tokens(run) and recipe["val_tokens"]:
        return val_tokens(run) == recipe["val_tokens"]
    return Path(here).name == Path(there).name


def differences(run, recipe, known):
    """Return {knob: [the run's value, the recipe's]} of those that differ and that curves depend on, also of
    the runs that this one began with. A knob that only one of them has came or went with a version. known:
    {name: recipe}."""
    here = knobs_of(run.saved)
    there = recipe["knobs"]
    found = {}
    for name in sorted(here.keys() & there.keys()):
        same = same_dataset(run, recipe) if name == "dataset" else here[name] == there[name]
        if not same:
            found[name] = [here[name], there[name]]
    scratch = run.saved.get("init_from") == "scratch"
    if scratch != (recipe["starts_from"] is None):
        return found | {"init_from": [run.saved.get("init_from"), recipe["starts_from"] or "scratch"]}
    parent = known.get(recipe["starts_from"])
    start = start_of(run) if parent else None
    if start:
        for name, pair in differences(start, parent, known).items():
            found[name if " of " in name else f"{name} of {start.folder}"] = pair
    return found


def find(run, name, known):
    """Return (the name of the recipe that a run follows, {}), or (that of the nearest, what differs), or
    (None, {}) if there is none of its stage. name: the recipe that is asked for, or None."""
    if name and name not in known:
        names = ", ".join(known) or "none, there are none"
        raise BadInput(f"--recipe={name} has no band in {FOLDER}: choose {names}.")
    if name and known[name]["stage"] != run.stage:
        raise BadInput(f"--recipe={name} is of {known[name]['stage']}, and {run.folder} is a run of "
                       f"{run.stage}: choose another.")
    candidates = {}
    for candidate, recipe in known.items():
        if candidate == name or not name and recipe["stage"] == run.stage:
            candidates[candidate] = differences(run, recipe, known)
    if not candidates:
        return None, {}
    nearest = min(candidates, key=lambda candidate: len(candidates[candidate]))
    return nearest, candidates[nearest]


# --- the verdict ---

def bands_for(run, recipe):
    """Return {figure: band} for a run: the recipe's, and where the run logs less often, that of the steps
    that both have. Steps to which the run has not come yet stay."""
    figures = {}
    for key, figure in recipe["figures"].items():
        values = series(run, key)
        kept = [i for i, step in enumerate(figure["steps"]) if step in values or step >= run.last_step]
        if any(figure["steps"][i] in values for i in kept):
            figures[key] = {"steps": [figure["steps"][i] for i in kept],
                            "runs": [[row[i] for i in kept] for row in figure["runs"]]}
    return band.bands(figures)


def judge(run, name=None, known=None):
    """Return what --json shows: {run, recipe, verdict: within, left or "no band", reason: of the last,
    differs: see `differences`, step: how far the run got, figures: that are judged, left: the first of
    band.departures of each figure, in the order of steps}. name: the recipe to judge by, None: the run's
    own. known: {name: recipe}."""
    known = recipes() if known is None else known
    recipe, differs = find(run, name, known)
    verdict = {"run": str(run.folder), "recipe": recipe, "verdict": "no band", "differs": differs,
               "step": run.last_step, "figures": [], "left": []}
    if recipe is None:
        return verdict | {"reason": f"no recipe of {run.stage} has one yet"}
    if differs and not name:
        what = in_words(differs)
        return verdict | {"reason": f"it differs from the nearest recipe that has one, {recipe}, in {what}"}
    bands = bands_for(run, known[recipe])
    left = []
    judged = []
    for key, of_figure in bands.items():
        values = series(run, key)
        left += band.departures(key, of_figure, values)[:1]
        if any(band.block_mean(key, steps, values) is not None for steps in of_figure["steps"]):
            judged.append(key)
    if not judged:
        return verdict | {"reason": f"it has logged none of the steps that {recipe} compares yet"}
    left.sort(key=lambda departure: departure["to"])
    return verdict | {"verdict": "left" if left else "within", "figures": judged, "left": left}


def in_words(differs, most=4):
    """Write what differs for people."""
    words = [f"{knob}={here} (there {there})" for knob, (here, there) in list(differs.items())[:most]]
    more = len(differs) - most
    return ", ".join(words) + (f" and {more} more" if more > 0 else "")


def describe(departure):
    """Write where a run left the band of a figure: which step, value, band."""
    first = departure["from"]
    last = departure["to"]
    where = f"at step {last}" if first == last else f"at steps {first} to {last}"
    between = f"{shown(departure['low'])} to {shown(departure['high'])}"
    return f"{departure['figure']} is {shown(departure['value'])} {where}, expected {between}"


def shown(value):
    return "not finite" if value is None else f"{value:.3g}"


def sentence(verdict, known):
    """Write a verdict for people. known: {name: recipe}."""
    run = verdict["run"]
    if verdict["verdict"] == "no band":
        return f"{run}: there is no band for it, because {verdict['reason']}."
    figures = ", ".join(verdict["figures"])
    by = f"{verdict['recipe']} ({len(known[verdict['recipe']]['seeds'])} seeds)"
    by += f", from which it differs in {in_words(verdict['differs'])}" if verdict["differs"] else ""
    if verdict["verdict"] == "within":
        return f"{run}: within the band of {by} up to step {verdict['step']}, in {figures}."
    first, *others = verdict["left"]
    also = f"; also {'; '.join(map(describe, others))}" if others else ""
    return (f"{run}: left the band of {by}: {describe(first)}{also}. "
            f"python -m doctor.plot {run} --expected draws it.")


def main(argv):
    cfg = config.load(Config, argv, positional="runs")
    if not cfg.runs:
        raise BadInput("Which run? python -m doctor.expected out/run")
    known = recipes()
    verdicts = [judge(open_run(run), cfg.recipe, known) for run in cfg.runs]
    for verdict in verdicts:
        print(json.dumps(verdict) if cfg.json else sentence(verdict, known))
    return LEFT if any(verdict["verdict"] == "left" for verdict in verdicts) else 0


if __name__ == "__main__":
    guard.run(main)
