"""What can be wrong with a run of train.py or grpo.py. A check looks at the figures of the last steps and
returns a sentence (what is wrong, the figure that shows it, what to change), or None. docs/diagnosis.md lists
them.
"""
import math
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, median

RECENT = 20                                  # steps that a check looks back on,
FEWEST = 3                                   # or as many logged ones, if it logs seldom
MOST = 500                                   # lines that are remembered
ENOUGH = 200                                 # samples, before it is said that none of them does something


@dataclass
class History:
    """What a run has written so far. knobs: its config; facts: what it knew of model and data at first."""
    knobs: dict = field(default_factory=dict)
    settings: dict = field(default_factory=dict)
    facts: dict = field(default_factory=dict)
    steps: list = field(default_factory=list)               # lines of metrics.jsonl, {figure: value}
    evaluations: list = field(default_factory=list)

    def add(self, line):
        """Take in a line. Of steps that were run again after a crash the last counts."""
        if "config" in line:
            self.knobs = line["config"]
            self.settings = line.get("settings", {})
            self.facts = line.get("facts", {}) | self.facts      # of a resumed run the first
        elif kind_of(line):
            lines = self.steps if kind_of(line) == "step" else self.evaluations
            while lines and lines[-1]["step"] >= line["step"]:
                lines.pop()
            lines.append(line)
            if len(lines) > MOST:            # a long run: every other of those that are past
                del lines[FEWEST:-RECENT:2]

    @property
    def is_rl(self):
        return "k_samples" in self.knobs

    @property
    def recent(self):
        """The lines of the last RECENT steps, and at least the last FEWEST; [] of a run that is younger."""
        if len(self.steps) < FEWEST:
            return []
        since = self.steps[-1]["step"] - RECENT
        last = len(self.steps) - FEWEST
        return [line for i, line in enumerate(self.steps) if line["step"] > since or i >= last]

    def values(self, key, lines=None):
        """Return a figure of the recent lines, or of others, where it is a number: [] if it is seldom one."""
        lines = self.recent if lines is None else lines
        values = [value for value in (number(line.get(key)) for line in lines) if value is not None]
        return values if 2 * len(values) > len(lines) else []

    def mean(self, key):
        """Return the mean of a figure over the recent lines, None if they don't have it."""
        values = self.values(key)
        return fmean(values) if values else None

    def samples(self, lines=None):
        """Return how many samples the recent lines, or others, are about."""
        groups = self.values("groups", lines) or [self.knobs.get("prompts_per_step", 0)]
        return int(sum(groups) * self.knobs["k_samples"])

    def last(self, key):
        """Return what the newest of the recent lines that has it says; None without one."""
        return next((line[key] for line in reversed(self.recent) if line.get(key) is not None), None)


def kind_of(line):
    """Tell what a line of metrics.jsonl is about: "step", "evaluation", or None if no check looks at it."""
    if "loss" in line:
        return "step"
    return "evaluation" if "val_loss" in line or "val_accuracy" in line else None


def number(value):
    """Return a figure as a float; None if it is none, or not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def short(text, most=160):
    """Write a sample's text on one line."""
    text = " ".join(str(text).split())
    return f'"{text[:most]}{"..." if len(text) > most else ""}"'


# --- reinforcement learning ---

HOT = 1.5                                    # temperature above which a model writes noise


def at_first(run, key):
    """Return a figure of the first logged step; 0 if it has none."""
    return number(run.steps[0].get(key)) or 0.0


def too_hot(run):
    """Return the advice for a temperature at which a model can't write its own text; None below."""
    temperature = run.knobs.get("temperature", 1)
    if temperature <= HOT:
        return None
    return f"at --temperature={temperature:g} the model writes noise: sample at 1"


def go_back(run):
    """Return the advice for a policy that was better at first."""
    return ("go back to a checkpoint from before, and lower "
            f"--learning_rate={run.knobs.get('learning_rate')} to a third, or --grad_clip; if the reward falls "
            "at any rate, the sign of the loss, the advantage or the reward is wrong")


def never_right(run):
    """No sample is ever right, and nothing else is paid for either."""
    if run.mean("pass_at_1") != 0 or (run.mean("reward") or 0) > 0.05 or run.samples() < ENOUGH:
        return None
    answered = run.mean("parts/answered")
    first = at_first(run, "pass_at_1")
    if too_hot(run):
        why = f": {too_hot(run)}"
    elif first > 0.1:
        why = f", while {first:.0%} were at first: {go_back(run)}"
    elif answered is not None and answered < 0.5:
        why = (f", and only {answered:.0%} have an answer at all: the form is not what the verifier reads. "
               "Fine-tune on verified answers first (datagen.py, config/rft.py), or show worked examples "
               "with --few_shot=4")
    elif answered is not None:
        why = (f", though {answered:.0%} have an answer: the questions are too hard for this model, or the "
               "verifier refuses what is right. Ask easier ones, or fine-tune on verified answers first "
               "(datagen.py)")
    else:
        why = ": grade a right answer by hand to see that it is paid, then ask easier questions or fine-tune"
    sample = run.last("sample")
    shown = f" One of them: {short(sample)}." if sample else ""
    return f"None of the last {run.samples():,} samples is right{why}.{shown}"


def never_ends(run):
    """Completions are cut off at max_new_tokens."""
    share = run.mean("truncated")
    if share is None or share < 0.5:
        return None
    limit = run.knobs.get("max_new_tokens")
    later = run.last("ends_later")
    first = at_first(run, "truncated")
    if too_hot(run):
        what = too_hot(run)
    elif first < 0.25 and (run.mean("reward") or 0) <= at_first(run, "reward"):
        what = f"{first:.0%} did at first, and the reward is no better for it, so {go_back(run)}"
    elif later is None:
        what = "raise --max_new_tokens if the answers are good so far, else fine-tune on answers that end"
    elif later:
        what = f"of a few that were let go on {later:.0%} ended: raise --max_new_tokens"
    else:
        what = ("a few were let go on and did not end, so the model does not know how to: fine-tune on "
                "answers that end, or give the task a STOP text that it does write")
    return f"{share:.0%} of the completions reach --max_new_tokens={limit} without an end: {what}."


def other_prompts(run):
    """Questions are put in another form than the model was trained with."""
    facts = run.facts
    if facts.get("unread_template"):
        return ("The model has a chat template that is none of chatml, so it is asked without it, as plain "
                "text: expect poor answers, or choose a model whose template is chatml.")
    asked = facts.get("prompt")
    trained = facts.get("trained_prompt")
    if not asked or not trained or asked == trained or run.knobs.get("few_shot"):
        return None
    return (f"Questions are asked as {asked!r}, and the model was trained on {trained!r}: give the task the "
            "form that the model knows (PROMPT), or fine-tune it on the new one first.")


def groups_alike(run):
    """Nearly all groups have the same reward for all their samples."""
    share = run.mean("zero_variance")
    right = run.mean("pass_at_1")
    if share is None or right is None or share < 0.9:
        return None
    first = at_first(run, "pass_at_1")
    others = "or have others drawn instead with --dynamic_sampling=true"
    if (run.mean("paid_elsewhere") or 0) > 0.9:
        why = ("an answer is paid as much for another question, so the reward does not depend on the answer: "
               "grade a right and a wrong one by hand")
        why += "" if right > 0.5 else ", and ask easier questions if the right one is paid more"
    elif right > 0.5:
        why = ("all are solved: the questions are too easy by now. Ask harder ones, let solved ones rest "
               f"with --skip_solved=2, or stop here, {others}")
    elif first > 0.1 and right < first / 4:
        why = (f"none is solved, while {first:.0%} were right at first, so the policy has collapsed: "
               f"{go_back(run)}")
    else:
        why = ("none is solved: the questions are too hard. Ask easier ones, raise --k_samples, or "
               f"fine-tune on verified answers first, {others}")
    return (f"In {share:.0%} of the groups all samples have the same reward, so they teach nothing; in most "
            f"of them {why}.")


def broken_verifier(run):
    """The verifier fails or takes too long."""
    errors = sum(run.values("errors") or [0])
    if not errors or errors < 0.02 * run.samples():
        return None
    late = sum(run.values("timeouts") or [0])
    example = run.last("error")
    said = f", the last: {short(example)}" if example else ""
    if late > errors / 2:
        return (f"The verifier took too long for {late:.0f} of the last {run.samples():,} samples, which "
                f"are not trained on: make it faster, or raise --timeout={run.knobs.get('timeout')}.")
    return (f"The verifier failed for {errors:.0f} of the last {run.samples():,} samples, which are not "
            f"trained on{said}: mend reward(question, completion).")


# Beyond which the engine's log-probabilities are off by more than rounding, nats a token
ROUNDING = {"torch.float32": 1e-3, "torch.float16": 0.02, "torch.bfloat16": 0.1}


def engine_differs(run):
    """The engine's log-probabilities are not the trainer's."""
    gap = run.mean("logprob_gap")
    most = ROUNDING.get(run.settings.get("engine"), 0.1)
    if run.settings.get("dtype") in ("bf16", "fp16"):
        most = max(most, ROUNDING["torch.bfloat16" if run.settings["dtype"] == "bf16" else "torch.float16"])
        # A model that is nearly certain of each token is hardly moved by rounding.
        most = min(most, 0.003 + 0.1 * (run.mean("entropy") or math.inf))
    if gap is None or gap <= most:
        return None
    return (f"The engine's log-probabilities are {gap:.2g} nats a token away from the trainer's, and rounding "
            f"in {run.settings.get('engine')} explains {most:.2g}: it is another model that is sampled. Compare with --attention=math and --compile=false, or correct for it "
            "with --tis_cap=2.")


def stale_engine(run):
    """The engine samples from weights that are not those of the last step."""
    stale = run.values("engine_stale")
    if not stale or not all(stale[-2:]):
        return None
    return ("The engine's weights are not the trainer's after a step, so answers come from an old model: "
            "engine.load(model) must follow each optimizer step.")


def rate_too_small(run):
    """Steps move no weight."""
    peak = run.knobs.get("learning_rate") or 0
    at_work = []                             # neither warming up nor at the end of the schedule
    for line in run.recent:
        if (number(line.get("lr")) or 0) >= peak / 2 and line.get("grad_norm"):
            at_work.append(line)
    moved = run.values("moved", at_work)
    if len(moved) < FEWEST or fmean(moved) > 1e-6:
        return None
    if not peak:
        return "The learning rate is 0, so no weight moves: give --learning_rate=."
    rounding = "in the engine's rounding " if run.is_rl else ""
    return (f"A step changes the weights {rounding}by {fmean(moved):.1g} of their size, which is nothing: "
            f"raise --learning_rate={peak}, ten times at first.")


def rate_too_large(run):
    """Steps tear the policy away from what sampled."""
    kl = run.mean("kl_old")
    clipped = run.mean("clip_fraction")
    moved = run.mean("moved")
    advice = f"lower --learning_rate={run.knobs.get('learning_rate')} to a third, or --grad_clip"
    if kl is not None and kl > 0.1:
        return f"Within a step the policy moves {kl:.2g} nats a token away from the sampler's (KL): {advice}."
    if clipped is not None and clipped > 0.3:
        return f"{clipped:.0%} of the tokens are clipped, the policy moves too far within a step: {advice}."
    if moved is not None and moved > 0.1:
        return f"Each step changes the weights by {moved:.0%} of their size: {advice}."
    return None


def reward_fell(run):
    """The reward was there and is gone."""
    rewards = run.values("reward", run.steps)
    if len(rewards) < 2 * FEWEST:
        return None
    now = fmean(rewards[-FEWEST:])
    best = max(fmean(rewards[i:i + FEWEST]) for i in range(len(rewards) - FEWEST))
    noise = math.sqrt(fmean((b - a) ** 2 for a, b in pairwise(rewards)) / 2)       # of one step's reward
    if now >= best / 2 or best - now < 0.05 + 5 * noise * math.sqrt(2 / FEWEST):
        return None
    return f"The reward has fallen from {best:.2f} to {now:.2f}: {go_back(run)}."


def same_samples(run):
    """The samples of a group are copies of one another: the entropy has collapsed."""
    distinct = run.mean("distinct")
    right = run.mean("pass_at_1")
    if distinct is None or distinct > 1.1 or right > 0.95:
        return None
    entropy = [number(line.get("entropy")) for line in run.recent if line.get("updates")]
    shown = f" (entropy {fmean(entropy):.2g} nats a token)" if entropy else ""
    return (f"Of the {run.knobs['k_samples']} samples of a group {distinct:.2f} differ{shown}: the policy "
            "has collapsed, and nothing is left to compare. Raise "
            f"--temperature={run.knobs.get('temperature')}, go back to a checkpoint from before, lower "
            "--learning_rate, or raise --clip_high.")


def memorised(run):
    """The reward rises and held-out accuracy falls."""
    if len(run.evaluations) < 2 or len(run.steps) < 2 * FEWEST:
        return None
    best = max(run.evaluations[:-1], key=lambda line: number(line.get("val_accuracy")) or 0)
    last = run.evaluations[-1]
    before = number(best.get("val_accuracy"))
    now = number(last.get("val_accuracy"))
    high = number(last.get("val_accuracy_high"))
    low = number(best.get("val_accuracy_low"))
    if None in (before, now, high, low) or high >= low:       # their intervals touch
        return None
    rewards = run.values("reward", run.steps)
    if not rewards or fmean(rewards[-FEWEST:]) < fmean(rewards[:FEWEST]) + 0.02:
        return None
    return (f"The reward rises ({fmean(rewards[:FEWEST]):.2f} to {fmean(rewards[-FEWEST:]):.2f}) and "
            f"held-out accuracy falls ({before:.0%} to {now:.0%}): the answers are learnt by heart, or the "
            "reward is paid for something else than being right. Read samples.txt, ask more questions, and "
            "keep the best checkpoint.")


def lengths_run_away(run):
    """Completions become much longer, or much shorter, than they were."""
    lengths = run.values("completion_tokens", run.steps)
    if len(lengths) < 2 * FEWEST:
        return None
    first = fmean(lengths[:FEWEST])
    now = fmean(lengths[-FEWEST:])
    if now > 2 * first and now > 0.5 * run.knobs.get("max_new_tokens", math.inf):
        return (f"Completions grow from {first:.0f} to {now:.0f} tokens: the reward does not mind length. "
                "Punish what is cut off with --overlong=penalty, and divide by a constant with "
                "--loss_type=dr_grpo.")
    if now < first / 3:
        return (f"Completions shrink from {first:.0f} to {now:.0f} tokens: giving up early pays as much as "
                "reasoning. Look into samples.txt at what the reward is paid for.")
    return None


def part_never_paid(run):
    """One part of the reward holds for no sample, though others do."""
    if not run.recent or run.samples() < ENOUGH:
        return None
    for key in run.recent[-1]:
        if key.startswith("parts/") and run.mean(key) == 0 and run.mean("reward"):
            return (f'The part "{key.removeprefix("parts/")}" of the reward holds for none of the last '
                    f'{run.samples():,} samples, so nothing leads there: check how it is computed, or make '
                    'it easier to reach.')
    return None


def part_always_paid(run):
    """A reward that is paid to all, and not for being right."""
    reward = run.mean("reward")
    right = run.mean("pass_at_1")
    if reward is None or right is None or right > 0.5 or reward < right + 0.05 or run.samples() < ENOUGH:
        return None
    for key in run.recent[-1]:
        if key.startswith("parts/") and run.mean(key) == 1:
            return (f'The part "{key.removeprefix("parts/")}" of the reward holds for all of the last '
                    f'{run.samples():,} samples and only {right:.0%} are right: what is paid for it teaches '
                    'nothing. Pay less for it, or ask more of it.')
    return None


def few_questions(run):
    """Each question is asked again and again."""
    times = run.last("epoch")
    if times is None or times <= 8:
        return None
    return (f"Each question has been asked {times:.0f} times: their answers are learnt by heart before "
            "long. Give more with --num_questions= or another --dataset=, and watch held-out accuracy.")


# --- pretraining and fine-tuning ---

def bad_start(run):
    """The first loss is not that of a model that knows nothing, or of one that knows something."""
    vocabulary = run.facts.get("vocabulary")
    if not vocabulary or not run.steps or run.steps[0]["step"] != 1:
        return None
    loss = number(run.steps[0].get("loss"))
    even = math.log(vocabulary)
    scratch = run.knobs.get("init_from") == "scratch"
    if loss is None or loss <= 1.1 * even and (loss >= 0.7 * even or not scratch):
        return None
    if scratch:
        return (f"The first loss is {loss:.2f}, and a model that knows nothing has ln {vocabulary:,} = "
                f"{even:.2f}: look at how the weights are drawn, or whether the text repeats a few tokens.")
    return (f"The first loss is {loss:.2f}, more than knowing nothing has (ln {vocabulary:,} = {even:.2f}): "
            "weights and tokenizer do not belong together, or the text is not what this model has read.")


def loss_spikes(run):
    """The loss jumps."""
    losses = run.values("loss", run.steps)
    if len(losses) < FEWEST + 1:
        return None
    lowest = min(losses[:-1])
    now = losses[-1]
    before = losses[-1 - FEWEST:-1]
    if now < max(before) + 0.3 or now < 1.3 * median(before) or now < 1.3 * lowest:
        return None
    return (f"The loss jumps from {before[-1]:.2f} to {now:.2f}: lower "
            f"--learning_rate={run.knobs.get('learning_rate')} to a third, warm up for longer, or look for "
            "broken text there.")


def loss_rises(run):
    """The loss of a model from scratch rises from the first step on, by small steps."""
    losses = run.values("loss", run.steps)
    begin = losses[:FEWEST + 1]
    if (len(begin) <= FEWEST or run.knobs.get("init_from") != "scratch" or begin != sorted(begin)
            or min(losses) < begin[0] or losses[-1] < 1.02 * begin[0] or (run.mean("moved") or 0) > 0.05):
        return None
    return (f"The loss rises from the first step on ({begin[0]:.2f} to {losses[-1]:.2f}), though steps are "
            "small: the sign of the loss or of its gradient is wrong, or the learning rate is far too large.")


def not_learning(run):
    """The loss stays where it was at the first step."""
    losses = run.values("loss", run.steps)
    if len(losses) < FEWEST or run.steps[-1]["step"] < 15 or run.knobs.get("init_from") != "scratch":
        return None
    first = losses[0]
    now = fmean(losses[-FEWEST:])
    if now < 0.98 * first:
        return None
    large = "too large" if now > 1.02 * first else "too small, or too large"
    return (f"After {run.steps[-1]['step']} steps the loss is {now:.2f}, where it began ({first:.2f}): "
            f"--learning_rate={run.knobs.get('learning_rate')} is {large}.")


def validation_rises(run):
    """The validation loss rises while that of training falls. Before the first step it is that of knowing
    nothing."""
    vocabulary = run.facts.get("vocabulary")
    per_epoch = run.facts.get("steps_per_epoch")
    even = math.log(vocabulary) if vocabulary else math.inf
    steps = [0] + [line["step"] for line in run.evaluations]
    losses = [even] + [number(line.get("val_loss")) for line in run.evaluations]
    training = run.values("loss", run.steps)
    if steps[-1] == 0 or None in losses or len(training) < 2:
        return None
    now = losses[-1]
    best = min(losses[:-1])
    at = steps[losses.index(best)]
    before = [number(line["loss"]) for line in run.steps if line["step"] <= at] or training[:1]
    if now < best * 1.01 + 0.005 or training[-1] >= min(before[-1], even):
        return None
    risen = (f"The validation loss rises ({best:.3f} at step {at}, now {now:.3f}) while that of training "
             f"falls (to {training[-1]:.3f})")
    worse = next((step for step, loss in zip(steps, losses) if step and loss > 1.01 * even), math.inf)
    if per_epoch and worse <= 10 * per_epoch and now > even:
        return (f"{risen}, above that of knowing nothing (ln {vocabulary:,} = {even:.2f}): the labels or the "
                "evaluation are wrong, or the validation text is of another kind.")
    if per_epoch and steps[-1] <= per_epoch:
        return (f"{risen}, though no text has been seen twice: the labels or the evaluation are wrong, the "
                "validation text is of another kind, or "
                f"--learning_rate={run.knobs.get('learning_rate')} is too large.")
    return f"{risen}: the text is learnt by heart. Stop with --patience=2, give more text, or --dropout=0.1."


def text_repeated(run):
    """The text is seen many times."""
    per_epoch = run.facts.get("steps_per_epoch")
    if not per_epoch or not run.steps or run.knobs.get("dropout"):
        return None
    epochs = run.steps[-1]["step"] / per_epoch
    if epochs <= 10:
        return None
    return (f"The data have been seen {epochs:.0f} times, without dropout: what repeats beyond about four "
            "times teaches little. Give more, train for less, or set --dropout=0.1.")


def slower_than_before(run):
    """The throughput is half of what it was."""
    speeds = run.values("tokens_per_s", run.steps[1:])       # the first step compiles
    if len(speeds) < 2 * FEWEST:
        return None
    usual = median(speeds[:-FEWEST])
    now = max(speeds[-FEWEST:])
    clock = run.values("seconds")
    hiccup = len(clock) > FEWEST and clock[-1] - clock[-1 - FEWEST] < 2
    if now > usual / 2 or hiccup:
        return None
    return (f"{now:,.0f} tokens/s, less than half of the {usual:,.0f} from before: something else uses the "
            "machine, or it is throttled (nvidia-smi, top).")


def waits_for_data(run):
    """The loader is what a step waits for."""
    waits = run.values("data_s")
    total = [sum(number(line.get(f"{part}_s")) or 0 for part in ("data", "forward_backward", "optimizer"))
             for line in run.recent]
    if not waits or sum(total) == 0 or sum(waits) < 0.2 * sum(total):
        return None
    return (f"{sum(waits) / sum(total):.0%} of the time goes into waiting for data: raise "
            f"--num_workers={run.settings.get('num_workers', 0)} or --prefetch, or put the tokens on a "
            "faster disk (--data_dir).")


def low_mfu(run):
    """A GPU computes far less than it could."""
    mfu = run.mean("mfu")
    if mfu is None or run.is_rl or mfu > 0.1 or run.facts.get("parameters", 0) < 5e7:
        return None
    return (f"MFU is {mfu:.1%}, a fraction of what bench.py measures for a model of this size: raise "
            "--batch_size, let --compile be on, and see `python bench.py --ladder` for what each costs.")


RL = (
    never_right, never_ends, other_prompts, groups_alike, broken_verifier, stale_engine, engine_differs,
    rate_too_small, rate_too_large, reward_fell, same_samples, memorised, lengths_run_away, part_never_paid,
    part_always_paid, few_questions, slower_than_before,
)
TRAINING = (
    bad_start, loss_spikes, loss_rises, not_learning, rate_too_small, validation_rises, text_repeated,
    slower_than_before, waits_for_data, low_mfu,
)

# What a check finds explains what these would say
EXPLAINS = {
    "broken_verifier": ("never_right", "groups_alike", "part_never_paid"),
    "other_prompts": ("never_right", "groups_alike"),
    "rate_too_large": ("never_right", "never_ends", "groups_alike", "same_samples", "reward_fell",
                       "lengths_run_away", "part_never_paid"),
    "stale_engine": ("engine_differs", "rate_too_large"),
    "never_ends": ("never_right", "groups_alike", "part_never_paid", "part_always_paid"),
    "never_right": ("groups_alike", "part_never_paid"),
    "same_samples": ("groups_alike",),
    "reward_fell": ("lengths_run_away",),
    "bad_start": ("not_learning",),
    "loss_spikes": ("not_learning", "validation_rises"),
    "loss_rises": ("loss_spikes", "not_learning"),
    "rate_too_small": ("not_learning",),
    "validation_rises": ("text_repeated",),
}


def examine(run):
    """Return {name of a check: its sentence} of those that find something, without what others explain."""
    found = {}
    for check in RL if run.is_rl else TRAINING:
        if sentence := check(run):
            found[check.__name__] = sentence
    explained = {name for cause in found for name in EXPLAINS.get(cause, ())}
    return {name: sentence for name, sentence in found.items() if name not in explained}
