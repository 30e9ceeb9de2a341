"""Measure what each change buys in accuracy: arms run in turn over seeds and answer the same unseen
questions, beside controls, with intervals that hold when seeds are added after looking (docs/compare.md).

    python compare.py experiments/objectives.py
    python compare.py --start=out/quickstart/rft --command="grpo.py config/grpo.py --max_steps=30" \\
        --arm="hotter: --temperature=1.5" --arm="rate x 10: --learning_rate=5e-3"
    python compare.py experiments/objectives.py --seeds=7                two seeds more

A command is a script with its options, or several stages, SCRIPT ... && SCRIPT ..., each from the model of
the stage before. compare.py adds --init_from, --seed, --out_dir and datagen.py's data where they are not
given; {start}, {seed} and {out} stand for start, seed and the run's folder. The same call resumes; finished
runs are not repeated.
"""
import json
import shlex
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Literal

from runtime.usage import first_line

first_line()                             # --help before the slow imports

import tasks
from measure import answers
from measure.ceilings import cpu_name, git_commit
from measure.runs import ROOT, as_flags, end_on_signals, make_folder, process, seconds_at, steps_of
from measure.runs import is_script, last_step, options_of, script_of, turned, words_of
from measure.intervals import FEWEST, MOST, comparison, sentence
from runtime import config, guard, lock
from runtime.checkpoint import write_atomically
from runtime.config import BadInput, Bounds, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from runtime.log import for_json


@dataclass
class Config:
    # the experiment
    start: str = ""                          # the run folder or model that every run begins with
    start_command: str = ""                  # instead of start: makes a model for each seed
    command: str = "grpo.py config/grpo.py"  # the base: the command with which arms are compared
    arms: dict | None = None                 # {NAME: its options beside the base's, or a whole command}
    arm: str = ""                            # one more arm, "NAME: OPTIONS"; may be repeated
    controls: str = "start"                  # of start, again (other seeds), placebo (random rewards), rft
    rft: str = ""                            # command of the control rft; empty: datagen.py, config/rft.py
    seeds: Annotated[int, Bounds(FEWEST, MOST)] = 3     # seeds of each arm
    budget: Literal["steps", "seconds"] = "steps"     # an arm's amount: the base's steps or seconds
    ranks: PositiveInt = 1                   # processes of each script but train.py
    out_dir: str = "out/compare"             # a folder for each run, answers/, comparison.json and .png
    # questions of the split test, the same for all runs
    task: str | dict | None = None           # None: the base's task
    questions: Annotated[int, Bounds(20, 10**6)] = 500     # test questions
    fresh: bool = False                      # draw other questions than the last call
    num_samples: Annotated[int, Bounds(2, 10**4)] = 8     # samples per question
    temperature: PositiveFloat = 1.0         # of these samples; greedy answers are counted apart
    max_new_tokens: PositiveInt | None = None     # longest answer; None: the base's
    few_shot: NonNegativeInt | None = None   # worked examples in the prompt; None: the base's
    device: str | None = None                # of evaluations and the control rft; None: the base's
    # the verdict
    measure: Literal["sampled", "greedy", "majority", "best"] = "sampled"     # majority: vote over a
                                             # question's samples; best: the one that the verifier prefers
    exact: bool = False                      # count exact answers only, of a task that tolerates others
    confidence: Literal["95", "99"] = "95"   # of each interval, %
    resolve: NonNegativeFloat = 2.0          # points that further seeds should resolve


CONTROLS = ("start", "again", "placebo", "rft")
RFT = ("datagen.py --temperature=1 --oversample=8 --keep_per_question=1 --stop_early && "
       "train.py config/rft.py --num_epochs=1.5 --learning_rate=none")
PROBE_STEPS = 10                             # of an arm, timed beside the base's first
PROBE_QUESTIONS = 200                        # of the control rft
TOLERANCE = 0.05                             # of an arm's seconds, before the verdict mentions them


# --- commands ---

def commands_of(cfg, extra):
    """Return {arm: command} of the base, the arms and the controls that run. extra: texts "NAME: OPTIONS"."""
    extra = [text.partition(":") for text in extra or filter(None, [cfg.arm])]
    cfg.arms = (cfg.arms or {}) | {name.strip(): options.strip() for name, _, options in extra}
    controls = [name for name in cfg.controls.split(",") if name]
    if set(controls) - set(CONTROLS):
        raise BadInput(f"--controls={cfg.controls} should name some of {', '.join(CONTROLS)}: correct it.")
    commands = {"base": cfg.command}
    for name, options in cfg.arms.items():
        is_text = isinstance(options, str) and options.strip()
        if name in ("base", "", *CONTROLS) or set(str(name)) & set("/[*?") or not is_text:
            raise BadInput(f"The arm {name} should be NAME: OPTIONS, with a new NAME without / [ * ?: "
                           "correct it.")
        commands[name] = options if is_script(words_of(options)[0]) else f"{cfg.command} {options}"
    of_controls = {"again": cfg.command, "placebo": cfg.command, "rft": cfg.rft or RFT}
    return commands | {name: of_controls[name] for name in controls if name != "start"}


def stages_of(command, start, seed, folder):
    """Return [[script, argument, ...]] of a command's stages; start: a model, or None."""
    for name, value in (("start", start), ("seed", seed), ("out", folder)):
        command = command.replace(f"{{{name}}}", shlex.quote(str(value)))
    stages = []
    data = None
    model = start
    parts = command.split("&&")
    for number, part in enumerate(parts, 1):
        script, *words = words_of(part) or [""]
        if not script_of(script).is_file():
            raise BadInput(f"'{part.strip()}' does not begin with a script: write SCRIPT.py OPTIONS.")
        added = {"seed": seed} | ({"init_from": model} if model else {})
        if is_datagen(script):               # resumed, it would not know the seconds before
            data = f"{folder}.{number}.json"
            added |= {"output": data, "overwrite": True, "json": True}
        else:
            model = str(folder) if number == len(parts) else f"{folder}.{number}"
            added |= {"out_dir": model, "resume": "auto"}
            added |= {"dataset": data} if data and Path(script).name == "train.py" else {}
        given = {word.partition("=")[0] for word in words}
        words += [flag for flag in as_flags(**added) if flag.partition("=")[0] not in given]
        stages.append([script, *words])
    return stages


def is_datagen(script):
    return Path(script).name == "datagen.py"


def with_amount(command, amount, task=None):
    """Return a command with another number of steps, or of a task's questions where datagen.py begins."""
    first, *others = command.split("&&")
    if is_datagen(words_of(first)[0]):
        return "&&".join([f"{first.rstrip()} --num_questions={answers.at_most(task, amount)} ", *others])
    return f"{command} --max_steps={amount}"


# --- runs ---

class Comparison:
    """A comparison's folder with its state in comparison.json: {"runs": {ARM-SEED: its commands, seconds and
    steps}, "amounts": {arm: steps, or questions of datagen.py}, "draws": of questions}. task: the base's."""

    def __init__(self, cfg, commands, task):
        self.cfg = cfg
        self.commands = commands
        self.task = task
        self.out = Path(cfg.out_dir)
        self.path = self.out / "comparison.json"
        make_folder(self.out / "answers")
        lock.take(self.out / "compare.lock", self.out)
        self.state = {"runs": {}, "amounts": {}, "draws": 1}
        if self.path.exists():
            self.state |= config.read_json(self.path, "restore it, or choose another --out_dir=")
            self.state["draws"] += cfg.fresh
        seed = answers.seed_of(self.out.name, self.state["draws"])
        drawn = answers.draw_questions(cfg.task, cfg.questions, seed, self.out, cfg.exact)
        self.questions, self.asked = drawn
        self.first_seed = 0
        self.files = {}                      # {arm: files of answers by seed}
        self.folders = set()                 # of all runs

    def save(self, **more):
        self.state |= for_json(more)
        write_atomically(self.path, json.dumps(self.state, indent=1).encode())

    def start(self, seed):
        """Return the model that a seed's runs begin with, made by start_command if there is one."""
        if self.cfg.start_command:
            return self.run(f"start-{seed}", self.cfg.start_command, seed, None)
        return answers.same_start(self.state, self.cfg.start.replace("{seed}", str(seed)))

    def run(self, name, command, seed, start):
        """Run a command's stages, unless it has finished before, and return its model's folder."""
        folder = self.out / name.replace(" ", "_")
        stages = stages_of(command, start, seed, folder)
        runs = self.state["runs"]
        if runs.get(name, {"command": stages})["command"] != stages or folder.exists() and name not in runs:
            raise BadInput(f"{folder} was made by another command than {shlex.join(stages[-1])}: restore the "
                           "experiment, or choose another --out_dir=.")
        steps = steps_of(folder)
        if steps and steps[-1]["step"] == runs[name].get("steps"):
            return str(folder)
        before = runs.get(name, {})
        done = [] if "steps" in before else before.get("done", [])           # seconds of finished stages
        runs[name] = {"command": stages, "commit": git_commit(), "done": done}
        self.save()
        for path in (self.out / "answers").glob(f"{folder.name}.*"):
            path.unlink()
        for number in range(len(done), len(stages)):
            script, *arguments = stages[number]
            ranks = 1 if Path(script).name == "train.py" else self.cfg.ranks
            said = process([str(script_of(script))], arguments, ranks, f"{name}: {Path(script).name}",
                           env={"SLURM_RESTART_COUNT": "0"})           # else datagen.py would resume
            of_stage = folder if number + 1 == len(stages) else f"{folder}.{number + 1}"
            last = json.loads(said.splitlines()[-1]) if is_datagen(script) else last_step(script, of_stage)
            done.append(last["seconds"])
            if of_stage != folder:
                self.save()
        runs[name] |= {"seconds": sum(done), "steps": last["step"]}
        self.save()
        print(f"{name}: {last['step']} steps in {sum(done):,.1f} s", flush=True)
        return str(folder)

    def command(self, arm):
        """Return an arm's command with its steps and the placebo's rewards, after the base's first run."""
        command = self.commands[arm]
        if arm == "placebo":
            rate = round(min(max(steps_of(self.out / "base-0")[0]["reward"], 0.02), 0.98), 3)
            task = answers.placebo(self.task, rate, self.out.resolve() / "placebo")
            command += f" {shlex.quote(f'--task={task}')}"
        if arm != "rft" and (self.cfg.budget == "steps" or arm in ("base", "again")):
            return command
        if arm not in self.state["amounts"]:
            self.state["amounts"][arm] = self.amount(arm, command)
        return with_amount(command, self.state["amounts"][arm], self.task)

    def amount(self, arm, command):
        """Return the steps, or questions of datagen.py, that take the seconds of the base's first run. A
        stage is timed by its first steps, several by one or two probes: more questions take less each."""
        base = self.state["runs"]["base-0"]
        few = PROBE_QUESTIONS if is_datagen(words_of(command)[0]) else min(PROBE_STEPS, base["steps"])
        folder = self.run(f"{arm}-probe", with_amount(command, few, self.task), 0, self.start(0))
        if "&&" not in self.commands["base"] + command:
            ratio = seconds_at(self.out / "base-0", few) / seconds_at(folder, few)
            return max(1, round(base["steps"] * ratio))
        short = self.state["runs"][f"{arm}-probe"]["seconds"]
        if short > base["seconds"] / 2:      # one probe is near enough
            return max(1, round(few * base["seconds"] / short))
        self.run(f"{arm}-probe2", with_amount(command, 5 * few, self.task), 0, self.start(0))
        longer = self.state["runs"][f"{arm}-probe2"]["seconds"]
        of_one = max(longer - short, longer / 10) / (4 * few)    # the probes differ by noise too
        return max(1, few // 10, round(few + (base["seconds"] - short) / of_one))

    def answer(self, name, model, seed):
        """Have eval.py answer the questions, unless it has, and return its files, greedy and sampled."""
        cfg = self.cfg
        common = [model, *as_flags(task=cfg.task, dataset=self.questions, few_shot=cfg.few_shot, seed=seed,
                                   max_new_tokens=cfg.max_new_tokens)]
        paths = []
        for more in ([], as_flags(num_samples=cfg.num_samples, temperature=cfg.temperature)):
            digest = zlib.crc32(shlex.join(common + more).encode())
            paths.append(self.out / "answers" / f"{name.replace(' ', '_')}.{digest:08x}.jsonl")
            if not paths[-1].exists():
                where = as_flags(output=paths[-1], device=cfg.device)
                process([str(ROOT / "eval.py")], common + more + where, cfg.ranks, f"{name}: eval.py")
        return paths

    def run_all(self, seed):
        """Run all arms in turn with a seed, in another order with each, and have the questions answered."""
        self.running = "start"
        start = self.start(seed)
        if "start" in self.cfg.controls.split(","):
            self.files.setdefault("start", []).append(self.answer(f"start-{seed}", start, seed))
        for arm in turned(list(self.commands), seed):
            self.running = arm
            seed_of_run = self.first_seed + seed + 1000 * (arm == "again")
            folder = self.run(f"{arm}-{seed}", self.command(arm), seed_of_run, start)
            self.folders |= {start, folder, *map(str, self.out.glob(f"{Path(folder).name}.[0-9]"))}
            self.files.setdefault(arm, []).append(self.answer(f"{arm}-{seed}", folder, seed))

    def figures(self):
        """Return ({arm: {measure: [seeds, questions]}}, {arm: mean seconds}, a note on the questions)."""
        kept, trained = answers.unseen(self.asked, self.folders)
        shares = {arm: answers.shares_of(by_seed, kept) for arm, by_seed in self.files.items()}
        seconds = {arm: fmean(self.state["runs"][f"{arm}-{seed}"]["seconds"] for seed in range(len(by_seed)))
                   for arm, by_seed in self.files.items() if arm in self.commands}
        return shares, seconds, (
            f"{len(kept)} questions of {self.cfg.task}, without {len(self.asked) - len(kept)} that are among "
            f"the {trained:,} in the runs' training records")


# --- the verdict ---

def verdicts(cfg, shares, seconds):
    """Return ({(arm, reference): figures}, [sentences]), a broken set-up first. shares: {arm: {measure:
    [seeds, questions]}}."""
    name = cfg.measure + " exact" * cfg.exact
    base = shares["base"][name]
    pairs = {(arm, "base"): own[name] - base for arm, own in shares.items() if arm not in ("base", "start")}
    if "start" in shares:
        pairs["base", "start"] = base - shares["start"][name]
        vote = shares["start"]["majority" + " exact" * cfg.exact]
        pairs["base", f"the start's vote over {cfg.num_samples}"] = base - vote
    if "placebo" in shares:
        pairs["placebo", "start"] = shares["placebo"][name] - shares["start"][name]
    compared = {pair: comparison(d, cfg.confidence) for pair, d in pairs.items()}
    sentences = []
    for (arm, reference), figures in compared.items():
        text = sentence(arm, reference, figures, cfg.resolve, cfg.confidence)
        more = seconds[arm] / seconds["base"] - 1
        if reference == "base" and abs(more) > TOLERANCE:
            text += f" ({arm} took {more:+.0%} seconds.)"
        gains = (arm, reference) == ("placebo", "start") and figures["low"] > 0
        broken = gains or arm == "again" and figures["verdict"] != "tie"
        sentences.append(f"The set-up is broken: {text}" if broken else text)
    return compared, sorted(sentences, key=lambda text: not text.startswith("The set-up is broken"))


# --- main ---

def check(cfg, commands):
    """Check every command's options, set those of the evaluation and of the control rft that come from the
    base, and return the base's task."""
    if bool(cfg.start) == bool(cfg.start_command):
        raise BadInput("Give either --start=, a run folder or model, or --start_command=, which makes one.")
    of_grpo = cfg.command.startswith("grpo.py") and "&&" not in cfg.command
    if "placebo" in commands and not ("start" in cfg.controls and of_grpo):
        raise BadInput("The control placebo needs a base of grpo.py alone and is compared with the start: "
                       "give --controls=start,placebo, or leave it out.")
    for command in (*commands.values(), *filter(None, [cfg.start_command])):
        stages = stages_of(command, cfg.start or "start", 0, Path(cfg.out_dir, "check"))
        options = [options_of(*stage) for stage in stages]
        if is_datagen(stages[-1][0]):
            raise BadInput(f"'{command}' ends without a model: add a stage of train.py.")
        if command == cfg.command:
            base = {name: value for stage in options for name, value in stage.items()}
    default = "unit_conversion" if "task" in base else str(base.get("dataset")).partition("task:")[2]
    task = tasks.spec_of(base.get("task") or default or cfg.task or "")
    cfg.task = tasks.spec_of(cfg.task or task)
    if not cfg.task:
        raise BadInput("The base has no task to answer questions of: give --task=.")
    cfg.max_new_tokens = cfg.max_new_tokens or base.get("max_new_tokens", 128)
    if cfg.few_shot is None:
        cfg.few_shot = answers.few_shot_of(base, cfg.start)
    cfg.device = cfg.device or base.get("device", "auto")
    if "rft" in commands and not cfg.rft:
        asked = as_flags(task=task, max_new_tokens=cfg.max_new_tokens, few_shot=cfg.few_shot)
        place = [] if cfg.device == "auto" else as_flags(device=cfg.device)
        for script, flags in (("datagen.py", asked + place), ("config/rft.py", place)):
            commands["rft"] = commands["rft"].replace(script, f"{script} {shlex.join(flags)}")
    return task


def main(argv):
    cfg = config.load(Config, argv)
    commands = commands_of(cfg, [word.partition("=")[2] for word in argv if word.startswith("--arm=")])
    runs = Comparison(cfg, commands, check(cfg, commands))
    end_on_signals()
    for seed in range(cfg.seeds):
        runs.run_all(seed)
    shares, seconds, note = runs.figures()
    compared, sentences = verdicts(cfg, shares, seconds)
    answers.print_table(cfg.num_samples, shares, compared, seconds)
    what = f"{cfg.measure}{', exact' * cfg.exact}, {cfg.seeds} seeds, {cfg.confidence}% intervals"
    print("\n".join([*sentences, f"({what}; {note}.)"]))
    means = {arm: {name: float(of.mean()) for name, of in own.items()} for arm, own in shares.items()}
    rows = [{"arm": arm, "reference": reference} | one for (arm, reference), one in compared.items()]
    runs.save(verdict=sentences, note=f"{what}; {note}", means=means, seconds=seconds, comparisons=rows,
              experiment=asdict(cfg), cpu=cpu_name(), commit=git_commit())
    answers.draw(runs.path.with_suffix(".png"), what, compared)
    print(f"All figures: {runs.path}")
    return 0


if __name__ == "__main__":
    guard.run(main)
