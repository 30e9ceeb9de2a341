"""Checks of a run of train.py or grpo.py. Each looks at the last steps and returns a sentence (the problem,
the figure that shows it, the remedy) or None; docs/diagnosis.md lists them."""
import math
from dataclasses import dataclass, field
from statistics import fmean, median

RECENT_STEPS = 20                            # steps that a check looks at,
MIN_LINES = 3                                # but at least this many logged ones
MAX_LINES = 500                              # kept in memory
MIN_SAMPLES = 200                            # needed for a statement about none or all of them
MIN_TRUNCATED_LINES = 10                     # needed for a statement about truncation of less than a half
MIN_QUESTIONS = 24                           # with one answer: fewer may well have the same right one


@dataclass
class History:
    """The logged lines of a run. facts: properties of model and data, logged at the start."""
    config: dict = field(default_factory=dict)
    settings: dict = field(default_factory=dict)
    facts: dict = field(default_factory=dict)
    steps: list = field(default_factory=list)               # lines of metrics.jsonl, {metric: value}
    evaluations: list = field(default_factory=list)
    moved_at: int = 0                                       # step of a resume with other settings

    def add(self, line):
        """Add a line. It replaces those of steps that were repeated after a crash."""
        if "config" in line:
            first = self.config.get("init_from", line["config"].get("init_from"))    # later it is "resume"
            self.config = line["config"] | ({"init_from": first} if first else {})
            if self.settings not in ({}, line.get("settings")):
                self.moved_at = line.get("step", 0)
            self.settings = line.get("settings", {})
            self.facts = line.get("facts", {}) | self.facts      # keep the first ones when a run is resumed
        elif kind_of(line):
            lines = self.steps if kind_of(line) == "step" else self.evaluations
            while lines and lines[-1]["step"] >= line["step"]:
                lines.pop()
            lines.append(line)
            if len(lines) > MAX_LINES:       # drop every other of the older lines
                del lines[MIN_LINES:-RECENT_STEPS:2]

    @property
    def is_rl(self):
        return "k_samples" in self.config

    @property
    def trains_on_rewards(self):
        """Whether rewards change the weights, not a teacher alone."""
        return self.config.get("reward_weight") != 0

    @property
    def recent(self):
        """The lines of the last RECENT_STEPS steps, at least MIN_LINES of them; [] if there are fewer."""
        if len(self.steps) < MIN_LINES:
            return []
        since = self.steps[-1]["step"] - RECENT_STEPS
        last = len(self.steps) - MIN_LINES
        return [line for i, line in enumerate(self.steps) if line["step"] > since or i >= last]

    def values(self, key, lines=None):
        """Return the numeric values of a metric in the given (default: recent) lines; [] if at most half of
        them have one."""
        lines = self.recent if lines is None else lines
        values = [value for value in (number(line.get(key)) for line in lines) if value is not None]
        return values if 2 * len(values) > len(lines) else []

    def mean(self, key):
        """Return the mean of a metric over the recent lines, None without values."""
        values = self.values(key)
        return fmean(values) if values else None

    def samples(self, lines=None):
        """Return the number of samples in the given (default: recent) lines."""
        groups = self.values("groups", lines) or [self.config.get("prompts_per_step", 0)]
        return int(sum(groups) * self.config["k_samples"])

    def last(self, key):
        """Return the newest value of a metric in the recent lines; None without one."""
        return next((line[key] for line in reversed(self.recent) if line.get(key) is not None), None)


def kind_of(line):
    """Return the kind of a line of metrics.jsonl: "step", "evaluation", or None if no check uses it."""
    if "loss" in line:
        return "step"
    return "evaluation" if "val_loss" in line or "val_accuracy" in line else None


def number(value):
    """Return a metric as a float; None if it is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def excerpt(text):
    """Return the beginning of a sample's text, quoted, on one line."""
    text = " ".join(str(text).split())
    return f'"{text[:160]}{"..." if len(text) > 160 else ""}"'


# --- reinforcement learning ---

MAX_TEMPERATURE = 1.5                        # above it a model writes noise


def first_value(run, key):
    """Return a metric of the first logged step; 0 if it has none."""
    return number(run.steps[0].get(key)) or 0.0


def temperature_advice(run):
    """Return the advice for a temperature above MAX_TEMPERATURE, else None."""
    temperature = run.config.get("temperature", 1)
    if temperature <= MAX_TEMPERATURE:
        return None
    return f"at --temperature={temperature:g} the model writes noise: lower it to 1"


def restart_advice(run):
    """Return the advice for a policy that has become worse."""
    hot = temperature_advice(run)
    hot = f"{hot}; also " if hot else ""
    return (f"{hot}restart from an earlier checkpoint and lower "
            f"--learning_rate={run.config.get('learning_rate')} to a third, or lower --grad_clip; if the "
            "reward falls at any learning rate, the sign of the loss, the advantage or the reward is wrong")


def unsolved(run):
    """Return the cause and the remedy where hardly any sample is right, as text."""
    answered = run.mean("parts/answered")
    first = first_value(run, "pass_at_1")
    if temperature_advice(run):
        return f"; {temperature_advice(run)}"
    if first > 0.1 and run.mean("pass_at_1") < first / 4:
        return f", while {first:.0%} were at the first step: the policy has collapsed; {restart_advice(run)}"
    if answered is not None and answered < 0.5:
        return (f", and only {answered:.0%} have an answer in the form that the verifier reads: fine-tune on "
                "verified answers first (datagen.py, config/rft.py), or show worked examples with "
                "--few_shot=4")
    prompt = run.facts.get("prompt")
    unknown = prompt and not run.facts.get("trained_prompt")
    other_form = f", or training had another prompt form than {prompt!r}" if unknown else ""
    return (f": the questions are too hard for this model{other_form}, or the verifier rejects correct "
            "answers or pays them little (grade one by hand). Ask easier questions, raise --k_samples, or "
            "fine-tune on verified answers first (datagen.py)")


def never_right(run):
    """No sample is ever correct, and nothing else is rewarded."""
    if run.mean("pass_at_1") != 0 or (run.mean("reward") or 0) > 0.05 or run.samples() < MIN_SAMPLES:
        return None
    if not run.trains_on_rewards:
        return None
    sample = run.last("sample")
    shown = f" One sample: {excerpt(sample)}." if sample else ""
    return f"None of the last {run.samples():,} samples is correct{unsolved(run)}.{shown}"


def task_never_right(run):
    """No sample of a mixture's task is ever correct, and nothing else of it is rewarded."""
    if not run.trains_on_rewards:
        return None
    keys = {key for line in run.recent for key in line if key.endswith("/pass_at_1")}
    for name in sorted(key.removesuffix("/pass_at_1") for key in keys):
        groups, right, paid = ([number(line.get(f"{name}/{key}")) or 0 for line in run.recent]
                               for key in ("groups", "pass_at_1", "reward"))
        n = int(sum(groups) * run.config["k_samples"])
        if n >= MIN_SAMPLES and max(right) == 0 and max(paid) <= 0.05:
            return (f"None of the last {n:,} samples of {name} is correct: ask easier questions of this "
                    "task, give it less weight, or fine-tune on its verified answers first (datagen.py).")
    return None


def right_unpaid(run):
    """Completions that end with the right answer earn nothing."""
    share = run.mean("right_unpaid")
    if share is None or share < 0.3:
        return None
    return (f"{share:.0%} of the completions that end with their question's answer earn nothing: the reward "
            "has the wrong sign, at least for some questions, or the verifier expects the answer in another "
            "place or form.")


def never_ends(run):
    """Completions are truncated at max_new_tokens."""
    share = run.mean("truncated")
    if share is None or share < 0.5:
        return None
    return f"{reaching_limit(run, share)} without ending{truncation_advice(run, share)}."


def truncated_unpaid(run):
    """A tenth of the completions or more is truncated, and hardly one of these is paid. In the first steps a
    model often stops rambling by itself."""
    share = run.mean("truncated")
    score = run.mean("truncated_score")
    reward = run.mean("reward")
    if len(run.steps) < MIN_TRUNCATED_LINES or None in (share, score, reward):
        return None
    newest = fmean(number(line.get("truncated")) or 0 for line in run.recent[-MIN_LINES:])
    if share >= 0.5 or min(share, newest) < 0.1 or reward < 0.05 or score > 0.1 * reward:
        return None
    return (f"{reaching_limit(run, share)} and earn {score:.2g} on average, all together {reward:.2g}"
            f"{truncation_advice(run, share)}.")


def reaching_limit(run, share):
    """Return the beginning of a sentence about truncated completions."""
    return f"{share:.0%} of the completions reach --max_new_tokens={run.config.get('max_new_tokens')}"


def truncation_advice(run, share):
    """Return the cause and the remedy of a share of truncated completions."""
    first = first_value(run, "truncated")
    if temperature_advice(run):
        return f"; {temperature_advice(run)}"
    if first < min(0.25, share / 2) and (run.mean("reward") or 0) <= first_value(run, "reward"):
        return f", {first:.0%} did at the first step, and the reward has not improved: {restart_advice(run)}"
    score = run.mean("truncated_score") or 0
    if score > 0.5 and run.config.get("overlong") != "penalty":
        return (f". These earn {score:.2f} on average, so the reward does not ask for an end: use "
                "--overlong=penalty, or set the task's STOP to a text behind the answer")
    return (": raise --max_new_tokens if the answers are good so far, else fine-tune on answers that end, "
            "or set the task's STOP to a text that the model writes")


def replies_too_long(run):
    """Episodes end because the environment's reply does not fit."""
    share = run.mean("reply_too_long")
    if share is None or share < 0.1:
        return None
    return (f"{share:.0%} of the episodes end because a reply of the environment does not fit: all replies "
            f"have room for --max_new_tokens={run.config.get('max_new_tokens')} tokens, if the model's "
            "positions allow them. Return shorter texts from respond(), raise --max_new_tokens, or choose a "
            "model with more positions.")


def one_answer(run):
    """Nearly all completions to different questions are the same text."""
    text = run.last("most_common_text")
    lines = []
    for line in reversed(run.recent):
        if (number(line.get("most_common_share")) or 0) < 0.9 or line["most_common_text"] != text:
            break
        lines.append(line)
    if len(lines) < MIN_LINES or sum(line["most_common_questions"] for line in lines) < MIN_QUESTIONS:
        return None
    newest = lines[0]
    reward = run.mean("reward") or 0
    if reward > first_value(run, "reward") or reward > 0.5:
        why = (f"the reward pays it {reward:.2f} on average. Let the reward depend on the question, or ask "
               "questions with other answers")
    else:
        why = f"the policy has collapsed; {restart_advice(run)}"
    return (f"{newest['most_common_share']:.0%} of the last step's completions, to "
            f"{newest['most_common_questions']} different questions, are the same text, "
            f"{excerpt(text)}: {why}.")


def other_prompts(run):
    """The prompts have another form than those that the model was trained on."""
    prompt = run.facts.get("prompt")
    trained = run.facts.get("trained_prompt")
    if not prompt or not trained or prompt == trained or run.config.get("few_shot"):
        return None
    return (f"Prompts have the form {prompt!r}, but the model was trained on {trained!r}: set the task's "
            "PROMPT to the model's form, or fine-tune the model on the new form first.")


def groups_alike(run):
    """Nearly all groups have zero variance."""
    share = run.mean("zero_variance")
    right = run.mean("pass_at_1")
    if share is None or right is None or share < 0.9 or not run.trains_on_rewards:
        return None
    why = f"no sample is correct{unsolved(run)}"
    if right > 0.5:
        skip = "" if run.config.get("skip_solved") else "skip solved ones with --skip_solved=2, "
        why = ("all samples are correct: the questions have become too easy. Ask harder ones, "
               f"{skip}or stop here")
    is_on = run.config.get("dynamic_sampling")
    more = "" if is_on else ", or replace such groups with --dynamic_sampling=true"
    return (f"{share:.0%} of the groups have zero variance, so they teach nothing; in most of them {why}"
            f"{more}.")


def ignores_question(run):
    """A text earns as much for another question."""
    share = run.mean("paid_elsewhere")
    if share is None or share <= 0.9:
        return None
    return (f"The reward does not depend on the answer: {share:.0%} of the rewarded texts earn the same "
            "reward for another question, so one text can serve for all. Grade a correct and a wrong answer "
            "by hand, and ask easier questions if the correct one earns more.")


def broken_verifier(run):
    """The verifier fails or times out."""
    errors = sum(run.values("errors") or [0])
    if not errors or errors < 0.02 * run.samples():
        return None
    timeouts = sum(run.values("timeouts") or [0])
    example = run.last("error")
    shown = f" (last error: {excerpt(example)})" if example else ""
    if timeouts > errors / 2:
        return (f"The verifier took too long for {timeouts:.0f} of the last {run.samples():,} samples, which "
                "are excluded from training: make it faster, or raise "
                f"--timeout, which is {run.config.get('timeout')}.")
    return (f"The verifier failed for {errors:.0f} of the last {run.samples():,} samples, which are excluded "
            f"from training{shown}: fix reward(question, completion).")


# Largest difference between the engine's and the trainer's logprobs that rounding explains, nats per token
ROUNDING = {"torch.float32": 1e-3, "torch.float16": 0.02, "torch.bfloat16": 0.1}


def engine_differs(run):
    """The engine's logprobs differ from the trainer's."""
    gap = run.mean("logprob_gap")
    limit = ROUNDING.get(run.settings.get("engine"), 0.1)
    if run.settings.get("dtype") in ("bf16", "fp16"):
        limit = max(limit, ROUNDING["torch.bfloat16" if run.settings["dtype"] == "bf16" else "torch.float16"])
        # Rounding hardly changes a model that is nearly certain of each token.
        limit = min(limit, 0.003 + 0.1 * (run.mean("entropy") or math.inf))
    if gap is None or gap <= limit or run.config.get("tis_cap"):
        return None
    return (f"The engine's logprobs differ from the trainer's by {gap:.2g} nats per token, of which rounding "
            f"in {run.settings.get('engine')} explains {limit:.2g}, so the engine samples from another "
            "distribution: compare with --attention=math and --compile=false, or correct for it with "
            "--tis_cap=2.")


def stale_engine(run):
    """The engine does not have the weights of the last step."""
    stale = run.values("engine_stale")
    if not stale or not all(stale[-2:]):
        return None
    return ("The engine's weights differ from the trainer's after a step, so completions come from an old "
            "model: call engine.load(model) after each optimizer step.")


def rate_too_small(run):
    """Steps hardly change the weights."""
    peak = run.config.get("learning_rate") or 0
    # neither in warm-up nor at the end of the schedule
    at_full_rate = [line for line in run.recent
                    if (number(line.get("lr")) or 0) >= peak / 2 and number(line.get("grad_norm"))]
    moved = run.values("moved", at_full_rate)
    if len(moved) < MIN_LINES or fmean(moved) > 1e-6:
        return None
    if not peak:
        return "The learning rate is 0, so no weight changes: set --learning_rate=."
    rounding = ", rounded to the engine's dtype," if run.is_rl else ""
    return (f"A step changes the weights{rounding} by only {fmean(moved):.1g} of their size: raise "
            f"--learning_rate={peak} tenfold at first.")


def rate_too_large(run):
    """Steps move the policy too far from the one that sampled."""
    kl = run.mean("kl_old")
    clipped = run.mean("clip_fraction")
    moved = run.mean("moved")
    passes = run.config.get("inner_epochs", 1)
    fewer = f"--inner_epochs={passes} or " if passes > 4 else ""
    advice = (f"lower {fewer}--learning_rate={run.config.get('learning_rate')} to a third, or lower "
              "--grad_clip")
    if kl is not None and kl > 0.1:
        return f"The policy moves by {kl:.2g} nats per token (KL) within a step: {advice}."
    if clipped is not None and clipped > 0.3:
        return f"{clipped:.0%} of the tokens are clipped: the policy moves too far within a step; {advice}."
    if moved is not None and moved > 0.1:
        return f"Each step changes the weights by {moved:.0%} of their size: {advice}."
    return None


def reward_fell(run):
    """The reward has dropped to less than half of its best."""
    rewards = run.values("reward", run.steps)
    if len(rewards) < 2 * MIN_LINES or run.config.get("skip_solved"):      # which leaves harder questions
        return None
    now = fmean(rewards[-MIN_LINES:])
    best = max(fmean(rewards[i:i + MIN_LINES]) for i in range(len(rewards) - MIN_LINES))
    # The noise of one step: in second differences a steady fall cancels, and noise has 6 times the variance.
    noise = math.sqrt(fmean((a - 2 * b + c) ** 2 for a, b, c in zip(rewards, rewards[1:], rewards[2:])) / 6)
    if now >= best / 2 or best - now < 0.05 + 5 * noise * math.sqrt(2 / MIN_LINES):
        return None
    return f"The reward has fallen from {best:.2f} to {now:.2f}: {restart_advice(run)}."


def same_samples(run):
    """The samples of a group are copies: the entropy has collapsed."""
    distinct = run.mean("distinct")
    right = run.mean("pass_at_1")
    temperature = run.config.get("temperature", 1)
    cold = temperature < 0.3                 # nearly greedy
    limit = run.config["k_samples"] / 4 if cold else 1.1
    if distinct is None or distinct > limit or right is not None and right > 0.95 and not cold:
        return None
    entropy = run.values("entropy", [line for line in run.recent if line.get("updates")])
    shown = f" (entropy {fmean(entropy):.2g} nats per token)" if entropy else ""
    why = ("the policy has collapsed. Raise --temperature, restart from an earlier checkpoint, lower "
           "--learning_rate, or raise --clip_high.")
    if cold:
        why = f"--temperature={temperature:g} is nearly greedy: set it to 1."
    elif first_value(run, "distinct") <= 1.1:
        why = ("so it was at the first step: either they draw the same random numbers, or this model hardly "
               "varies its answers at this temperature.")
    return (f"Only {distinct:.2f} of the {run.config['k_samples']} samples of a group are distinct{shown}: "
            f"{why}")


def held_out_fall(run):
    """Return (text that greedy held-out accuracy falls, whether the reward rises); (None, False) if not."""
    if len(run.evaluations) < 2 or len(run.steps) < 2 * MIN_LINES:
        return None, False
    best = max(run.evaluations[:-1], key=lambda line: number(line.get("val_accuracy")) or 0)
    last = run.evaluations[-1]
    before = number(best.get("val_accuracy"))
    now = number(last.get("val_accuracy"))
    high = number(last.get("val_accuracy_high"))
    low = number(best.get("val_accuracy_low"))
    rewards = run.values("reward", run.steps)
    if None in (before, now, high, low) or high >= low or not rewards:       # the intervals overlap
        return None, False
    first = fmean(rewards[:MIN_LINES])
    latest = fmean(rewards[-MIN_LINES:])
    rises = latest >= first + 0.02
    earlier = number(run.evaluations[-2].get("val_accuracy_high"))
    if not rises and (earlier is None or earlier >= low):     # the best of many evaluations is partly noise
        return None, False
    return (f"The reward {'rises' if rises else 'does not rise'} ({first:.2f} to {latest:.2f}) while greedy "
            f"held-out accuracy falls ({before:.0%} to {now:.0%})"), rises


def memorised(run):
    """The reward rises while held-out accuracy falls, and questions have been repeated."""
    fall, rises = held_out_fall(run)
    if not rises or (run.last("epoch") or 2) <= 1:
        return None
    return (f"{fall}: the model memorises the answers, or the reward does not measure correctness. Read "
            "rollouts/, use more questions, and keep the best checkpoint.")


def greedy_falls(run):
    """Held-out accuracy falls although the reward does not rise, or in the first epoch, in which nothing is
    memorised."""
    fall, rises = held_out_fall(run)
    if not fall or rises and (run.last("epoch") or 2) > 1:
        return None
    advice = (f"lower --learning_rate={run.config.get('learning_rate')} to a third, or --temperature, which "
              f"is {run.config.get('temperature', 1):g}, and keep the best checkpoint")
    if not rises:
        return f"{fall}: updates do more harm than good; {advice}."
    return (f"{fall}, although no question has been asked twice. Either sampled answers improve at the "
            f"expense of greedy ones: {advice}. Or training questions are paid for something else than "
            "held-out ones: read the completions (python -m doctor.page).")


def rises(run, key):
    """Tell whether a metric is above that of the first steps by more than 0.05."""
    values = run.values(key, run.steps)
    return len(values) > MIN_LINES and fmean(values[-MIN_LINES:]) > fmean(values[:MIN_LINES]) + 0.05


def lengths_run_away(run):
    """Completions become much longer or much shorter than at first."""
    lengths = run.values("completion_tokens", run.steps)
    if len(lengths) < 2 * MIN_LINES:
        return None
    first = fmean(lengths[:MIN_LINES])
    now = fmean(lengths[-MIN_LINES:])
    limit = run.config.get("max_new_tokens", math.inf)
    if now > 2 * first and now > 0.5 * limit and not rises(run, "pass_at_1"):
        remedies = [text for name, value, text in (
            ("overlong", "penalty", "penalise truncated ones with --overlong=penalty"),
            ("loss_type", "dr_grpo", "use a constant loss denominator with --loss_type=dr_grpo"))
            if run.config.get(name) != value] or ["let reward() charge for length"]
        return (f"Completions grow from {first:.0f} to {now:.0f} tokens, although no more are right: "
                f"{', and '.join(remedies)}.")
    if now < first / 3 and not rises(run, "reward"):
        return (f"Completions shrink from {first:.0f} to {now:.0f} tokens, so giving up early earns as much "
                "as reasoning: see which completions are rewarded (python -m doctor.page).")
    return None


def paid_unlike(run):
    """The same completion of the same question is paid differently."""
    share = run.mean("copies_paid_unlike")
    if share is None or share < 0.02:
        return None
    return (f"The same text for the same question got different rewards, for {share:.0%} of the texts that "
            "were sampled twice: rewards are random, mixed up among completions, or depend on the verifier's "
            "state.")


def advantages_unlike_rewards(run):
    """Advantages do not follow the rewards of their group."""
    fit = run.mean("advantage_fit")
    if fit is None or fit > 0.98:
        return None
    return (f"Advantages have a correlation of {fit:.2f} with the rewards of their group, and 1 is right: "
            "they belong to other completions or groups, or have another sign. Check their order and shape "
            "in set_advantages.")


def paid_by_length(run):
    """The reward is a function of the length."""
    fit = run.mean("length_fit")
    if fit is None or fit < 0.98:
        return None
    right = run.mean("pass_at_1")
    lengths = run.values("completion_tokens", run.steps)
    return (f"The length of a completion explains {fit:.0%} of its reward, and {right:.0%} are right (score "
            f"1); completions had {lengths[0]:.0f} tokens at first and have {lengths[-1]:.0f} now. Pay for "
            "the answer, and for length only among right ones.")


def beta_too_large(run):
    """The KL term outweighs the reward."""
    beta = run.config.get("beta") or 0
    if beta < 1 or run.config.get("teacher") or not run.recent:
        return None
    return (f"--beta={beta:g} gives the KL divergence from the initial model more weight than the reward, "
            "and holds the policy back: 0 to 0.1 is usual.")


def one_prompt(run):
    """An optimizer step sees one question."""
    prompts = run.config.get("prompts_per_step", 0) / run.config.get("mini_batches", 1)
    if not run.recent or prompts != 1:
        return None
    return ("Each optimizer step sees one question, so its gradient is noisy, and a group with zero variance "
            "leaves nothing to learn: raise --prompts_per_step, to 32 for example.")


def part_with_mean(run, mean):
    """Return the first part of the reward with this mean over the recent lines, None without one."""
    keys = [key for key in run.recent[-1] if key.startswith("parts/") and run.mean(key) == mean]
    return keys[0].removeprefix("parts/") if keys else None


def part_never_paid(run):
    """One part of the reward is true for no sample, although the reward is not zero."""
    parts = [key for key in run.recent[-1] if key.startswith("parts/")] if run.recent else []
    if parts == ["parts/correct"]:           # of a graded reward without parts: never full marks
        return None
    if not run.recent or run.samples() < MIN_SAMPLES or not run.mean("reward") or not part_with_mean(run, 0):
        return None
    return (f'The reward\'s part "{part_with_mean(run, 0)}" is true for none of the last {run.samples():,} '
            "samples, so it gives no signal: check how it is computed, or make it easier to reach.")


def part_always_paid(run):
    """A part of the reward is true for all samples, most of which are wrong."""
    reward = run.mean("reward")
    right = run.mean("pass_at_1")
    if reward is None or right is None or right > 0.5 or reward < right + 0.05 or run.samples() < MIN_SAMPLES:
        return None
    part = part_with_mean(run, 1)
    return part and (f'The reward\'s part "{part}" is true for all of the last {run.samples():,} samples, '
                     f"but only {right:.0%} are correct, so this part teaches nothing: give it less weight, "
                     "or make it harder to reach.")


def paid_for_replies(run):
    """The reward pays for an answer that the environment's texts alone hold."""
    share = run.mean("paid_replies")
    if share is None or share < 0.2:
        return None
    return (f"{share:.0%} of the right samples are paid for an answer that stands in the environment's text "
            "alone: let reward(question, completion, turns) look for it in turns[-1], the model's last text.")


def few_questions(run):
    """Each question is asked many times."""
    times = run.last("epoch")
    if times is None or times <= 8:
        return None
    return (f"Each question has been asked {times:.0f} times, so the model will soon memorise the answers: "
            "use more with --num_questions= or another --dataset=, and watch held-out accuracy.")


# --- pretraining and fine-tuning ---

def bad_start(run):
    """The first loss is far from that of uniform predictions, or above it for a trained model."""
    vocabulary = run.facts.get("vocabulary")
    if not vocabulary or not run.steps or run.steps[0]["step"] != 1:
        return None
    loss = number(run.steps[0].get("loss"))
    uniform = math.log(vocabulary)
    scratch = run.config.get("init_from") == "scratch"
    divergence = run.config.get("teacher")               # from a teacher, which may be small
    low = 0.7 * uniform if scratch and not divergence else 0
    newest = run.values("loss")              # a model that was trained on other text recovers within steps
    trained = run.config.get("init_from") not in ("scratch", "resume") and not divergence
    second = run.values("loss", run.steps)[1:2] or [0]
    if trained and loss and abs(loss - uniform) < 0.01 * uniform and second[0] > 0.6 * uniform:
        return (f"The first loss is {loss:.2f}, that of uniform predictions (ln {vocabulary:,}): the model "
                "that the run starts from is untrained, or its weights were not loaded.")
    if loss is None or low <= loss <= 1.1 * uniform:
        return None
    if not scratch and (run.steps[-1]["step"] < 15 or not newest or newest[-1] < max(uniform, 0.8 * loss)):
        return None
    if scratch:
        return (f"The first loss is {loss:.2f}, but uniform predictions have ln {vocabulary:,} = "
                f"{uniform:.2f}: check the initialisation of the weights, and whether the text repeats a few "
                "tokens.")
    pair = "teacher" if divergence else "tokenizer"          # the divergence is a part of the loss
    return (f"The loss is {newest[-1]:.2f} (at first {loss:.2f}), above that of uniform predictions (ln "
            f"{vocabulary:,} = {uniform:.2f}): the model and the {pair} do not belong together, or the model "
            "was trained on text of another kind.")


def loss_spikes(run):
    """The loss jumps."""
    losses = run.values("loss", run.steps)
    if len(losses) < MIN_LINES + 1:
        return None
    lowest = min(losses[:-1])
    now = losses[-1]
    before = losses[-1 - MIN_LINES:-1]
    if now < max(before) + 0.3 or now < 1.3 * median(before) or now < 1.3 * lowest:
        return None
    return (f"The loss jumps from {before[-1]:.2f} to {now:.2f}: lower "
            f"--learning_rate={run.config.get('learning_rate')} to a third, use a longer warm-up, or look "
            "for broken text at this step.")


def steps_skipped(run):
    """Many steps have gradients that are not finite."""
    skipped = run.last("skipped_steps") or 0
    in_step = run.config.get("inner_epochs", 1) * run.config.get("mini_batches", 1)
    updates = (run.last("step") or 0) * in_step
    if skipped < 20 or skipped < 0.05 * updates:
        return None
    return (f"{skipped:.0f} of {updates:.0f} updates were skipped, since their gradients were not finite: "
            f"lower --learning_rate={run.config.get('learning_rate')}, or train with --dtype=bf16 or fp32.")


def loss_rises(run):
    """The loss of a model from scratch rises from the first step, although steps are small."""
    losses = run.values("loss", run.steps)
    begin = losses[:MIN_LINES + 1]
    if (len(begin) <= MIN_LINES or run.config.get("init_from") != "scratch" or begin != sorted(begin)
            or min(losses) < begin[0] or losses[-1] < 1.02 * begin[0] or (run.mean("moved") or 0) > 0.05):
        return None
    return (f"The loss rises from the first step ({begin[0]:.2f} to {losses[-1]:.2f}), although steps are "
            "small: the loss or its gradient has the wrong sign, or the learning rate is far too large.")


def not_learning(run):
    """The loss does not fall."""
    losses = run.values("loss", run.steps)
    if len(losses) <= MIN_LINES or run.steps[-1]["step"] < 15 or run.config.get("init_from") != "scratch":
        return None
    peak = run.config.get("learning_rate") or 0
    if max(run.values("lr", run.steps), default=peak) < peak / 2:            # in warm-up
        return None
    first = losses[0]
    now = fmean(losses[-MIN_LINES:])
    if now < 0.98 * first:
        return None
    large = "too large" if now > 1.02 * first else "too small or too large"
    norm = number(run.last("grad_norm")) or 0
    if norm > 20 * first_value(run, "grad_norm"):
        large += f", or gradients add up over the steps without zero_grad (their norm is {norm:.3g} now)"
    return (f"After {run.steps[-1]['step']} steps the loss is {now:.2f}, no better than at first "
            f"({first:.2f}): --learning_rate={run.config.get('learning_rate')} is {large}.")


def risen_beyond_noise(losses):
    """Tell whether the last validation loss is above the best by more than a tenth, the last two are by more
    than 2% and 0.05, or the last is by more than noise."""
    now = losses[-1]
    best = min(losses[:-1])
    # one evaluation's standard deviation: see reward_fell; the median leaves the first fall out
    bends = [abs(a - 2 * b + c) for a, b, c in zip(losses[1:], losses[2:], losses[3:])]
    noise = 1.48 * median(bends) / math.sqrt(6) if len(bends) > 1 else math.inf
    return (now > 1.1 * best + 0.1 or min(losses[-2:]) > 1.02 * best + 0.05
            or now > 1.01 * best + 0.005 + 7 * noise)


def validation_rises(run):
    """The validation loss rises while the training loss falls. Step 0 counts as uniform predictions, or as
    the first training loss if that is higher."""
    vocabulary = run.facts.get("vocabulary")
    per_epoch = run.facts.get("steps_per_epoch")
    uniform = math.log(vocabulary) if vocabulary else math.inf
    steps = [0] + [line["step"] for line in run.evaluations]
    training = run.values("loss", run.steps)
    losses = [max([uniform, *training[:1]])] + [number(line.get("val_loss")) for line in run.evaluations]
    if steps[-1] == 0 or None in losses or len(training) < 2:
        return None
    now = losses[-1]
    best = min(losses[:-1])
    at = steps[losses.index(best)]
    before = run.values("loss", [line for line in run.steps if line["step"] <= at]) or training[:1]
    now_trained = fmean(training[-MIN_LINES:])
    if not risen_beyond_noise(losses) or now_trained >= min(fmean(before[-MIN_LINES:]), uniform):
        return None
    risen = (f"The validation loss rises ({best:.3f} at step {at}, now {now:.3f}) while the training loss "
             f"falls (to {now_trained:.3f})")
    worse = next((step for step, loss in zip(steps, losses) if step and loss > 1.01 * uniform), math.inf)
    early = f"{risen}, although no text has been repeated"
    if per_epoch and worse <= 10 * per_epoch and now > uniform:
        early = f"{risen}, and the former exceeds that of uniform predictions (ln V = {uniform:.2f})"
    elif not per_epoch or steps[-1] > per_epoch:
        return f"{risen}: the model memorises the text. Use --patience=2, more text, or --dropout=0.1."
    return (f"{early}: the labels or the evaluation are wrong, the loader repeats a batch, the validation "
            f"text is of another kind, or --learning_rate={run.config.get('learning_rate')} is too large.")


def text_repeated(run):
    """The text is repeated many times."""
    per_epoch = run.facts.get("steps_per_epoch")
    if not per_epoch or not run.steps or run.config.get("dropout"):
        return None
    epochs = run.steps[-1]["step"] / per_epoch
    if epochs <= 10:
        return None
    return (f"The run has made {epochs:.0f} passes over the data without dropout, and those after about the "
            "fourth teach little: use more data, train for fewer steps, or set --dropout=0.1.")


def slower_than_before(run):
    """The throughput has halved."""
    steps = [line for line in run.steps[1:] if line["step"] > run.moved_at]  # the first step compiles
    speeds = run.values("tokens_per_s", steps)
    if len(speeds) < 2 * MIN_LINES:
        return None
    usual = median(speeds[:-MIN_LINES])
    now = max(speeds[-MIN_LINES:])
    clock = run.values("seconds", run.steps)
    hiccup = len(clock) > MIN_LINES and clock[-1] - clock[-1 - MIN_LINES] < 2
    done = run.values("completions_per_s", steps)            # of grpo.py, where short answers take less
    as_many = done and max(done[-MIN_LINES:]) > median(done[:-MIN_LINES]) / 2
    if now > usual / 2 or hiccup or as_many:
        return None
    return (f"The throughput is {now:,.0f} tokens/s, less than half of the earlier {usual:,.0f}: another "
            "process uses the machine, or it is throttled (see nvidia-smi, top).")


def waits_for_data(run):
    """Steps wait for the data loader, whose start makes the first one slow."""
    shares = []
    for line in run.recent:
        parts = [number(line.get(f"{part}_s")) or 0 for part in ("data", "forward_backward", "optimizer")]
        if line is not run.steps[0] and sum(parts):
            shares.append(parts[0] / sum(parts))
    if len(shares) < MIN_LINES or median(shares) < 0.2:
        return None
    workers = run.settings.get("num_workers") or 0
    return (f"{median(shares):.0%} of the time is spent waiting for data: set --num_workers={workers + 2} "
            f"(now {workers}), raise --prefetch, or move the tokens to a faster disk (--data_dir).")


def low_mfu(run):
    """The GPU is far below its peak."""
    mfu = run.mean("mfu")
    if mfu is None or run.is_rl or mfu > 0.1 or run.facts.get("parameters", 0) < 5e7:
        return None
    return (f"MFU is {mfu:.1%}, far below bench.py's for a model of this size: raise --batch_size, use "
            "--compile, and run `python bench.py --stage=train --ladder` to see the effect of each option.")


# --- data and options, of both ---

def repeated_rows(run):
    """Few training rows are distinct."""
    rows = run.facts.get("rows") or 0
    distinct = run.facts.get("distinct_rows") or 0
    least = 0.25 if run.facts.get("unit") == "examples" else 0.02       # short generated documents recur
    if rows < 20 or distinct > least * rows:
        return None
    return (f"Only {distinct:,} of the first {rows:,} {run.facts['unit']} are distinct, so the model sees "
            "the same ones again and again: check how the data was written.")


def held_out_trained(run):
    """Rows of the validation split are trained on."""
    share = run.facts.get("held_out_trained") or 0
    if share < 0.75:
        return None
    unit = run.facts["unit"]
    return (f"The validation split is part of the training data ({share:.0%} of its {unit}), so its loss or "
            f"accuracy says nothing about new {unit}: hold others out.")


def prompts_with_answer(run):
    """Prompts contain the answer."""
    share = run.facts.get("prompts_with_answer") or 0
    if share < 0.75:
        return None
    return (f"The answer stands in the prompt of {share:.0%} of the {run.facts['unit']}, so the model learns "
            "to copy it: take it out, unless prompts list options or copying is the task.")


def bad_targets(run):
    """Prompts have several answers, or all examples the same; many have none, or prompts are targets."""
    conflicting = run.facts.get("conflicting") or 0
    if conflicting > 0.1:
        return (f"The same prompt stands in the data with different numbers as its answer ({conflicting:.0%} "
                "of the rows add one to their prompt): check how prompts and answers were joined.")
    distinct = run.facts.get("distinct_answers")
    empty = run.facts.get("empty_answers") or 0
    if run.is_rl or distinct is None or run.facts["rows"] < 20:
        return None
    if distinct == 1 and run.facts["distinct_rows"] > 1:
        return ("All examples have the same completion, whatever their prompt: check which column it comes "
                "from.")
    if run.facts.get("prompt_targets", 0) > 0.5:
        return "Prompts are trained on like completions: check the mask of the targets (is_target)."
    if empty < 0.1:
        return None
    return f"{empty:.0%} of the completions are empty, so the model learns to say nothing: leave them out."


def decay_too_strong(run):
    """Weight decay shrinks the weights more than gradients can make up for."""
    decay = run.config.get("weight_decay") or 0
    rates = run.values("lr", run.steps)
    if not decay or not rates:
        return None
    shrunk = 1 - math.exp(-decay * fmean(rates) * run.steps[-1]["step"])
    if decay * max(rates) < 0.01 and (decay < 1 or shrunk < 0.1):
        return None
    return (f"--weight_decay={decay:g} at a learning rate of {max(rates):.2g} takes "
            f"{decay * max(rates):.1%} of the weights a step, {shrunk:.0%} so far without gradients: set it "
            "to 0.1 or less.")


def untrained_teacher(run):
    """The teacher predicts the training text, or the model's completions, no better than uniformly."""
    uniform = math.log(run.facts.get("vocabulary") or 1)
    loss = number(run.facts.get("teacher_loss"))
    divergence = first_value(run, "kl") if run.is_rl and run.config.get("teacher") and run.steps else 0
    divergences = run.values("kl") if run.is_rl and run.config.get("teacher") else []
    if divergences and max(divergences) < 1e-6 and not run.config.get("reward_weight", 1):
        return ("The KL divergence from the teacher is 0, and nothing else is trained on: the teacher is the "
                "model itself.")
    if loss is not None and loss > 0.9 * uniform:
        bad = f"The teacher's own loss on the first examples is {loss:.2f} nats per token"
    elif uniform and divergence > 0.5 * uniform:
        bad = f"The KL divergence from the teacher is {divergence:.2f} nats per token at the first step"
    else:
        return None
    return (f"{bad}, near that of uniform predictions (ln V = {uniform:.2f}): the teacher is untrained, or "
            "was trained on other text. Check its own answers with eval.py.")


DATA = (repeated_rows, held_out_trained, prompts_with_answer, bad_targets, decay_too_strong,
        untrained_teacher)
RL = (never_right, task_never_right, right_unpaid, never_ends, truncated_unpaid, replies_too_long, one_answer,
      other_prompts, groups_alike, ignores_question, broken_verifier, paid_unlike, advantages_unlike_rewards,
      paid_by_length, beta_too_large, one_prompt, stale_engine, engine_differs, rate_too_small,
      rate_too_large, reward_fell, same_samples, memorised, greedy_falls, lengths_run_away, part_never_paid,
      part_always_paid, paid_for_replies, few_questions, steps_skipped, slower_than_before, *DATA)
TRAINING = (bad_start, loss_spikes, loss_rises, not_learning, rate_too_small, rate_too_large,
            validation_rises, text_repeated, steps_skipped, slower_than_before, waits_for_data, low_mfu,
            *DATA)

# {finding: findings that it explains, which are suppressed}
UNLEARNT = ("never_right", "never_ends", "truncated_unpaid", "groups_alike", "same_samples", "reward_fell",
            "lengths_run_away", "part_never_paid", "part_always_paid", "memorised", "greedy_falls")
EXPLAINS = {
    "broken_verifier": ("never_right", "groups_alike", "part_never_paid"),
    "other_prompts": ("never_right", "groups_alike"),
    "never_ends": ("never_right", "groups_alike", "part_never_paid", "part_always_paid"),
    "replies_too_long": ("never_right", "groups_alike", "part_never_paid"),
    "one_answer": ("groups_alike", "same_samples", "lengths_run_away"),
    "never_right": ("task_never_right", "groups_alike", "part_never_paid"), "right_unpaid": UNLEARNT,
    "ignores_question": ("groups_alike", "never_ends"),
    "same_samples": ("groups_alike",), "reward_fell": ("lengths_run_away", "greedy_falls"),
    "bad_start": ("not_learning",),
    "loss_spikes": ("not_learning", "validation_rises"), "loss_rises": ("loss_spikes", "not_learning"),
    "rate_too_small": ("not_learning",), "validation_rises": ("text_repeated",),
    "prompts_with_answer": ("groups_alike", "never_right"),
    "rate_too_large": (*UNLEARNT, "not_learning"), "stale_engine": ("engine_differs", "rate_too_large"),
    "paid_unlike": (*UNLEARNT, "right_unpaid"), "advantages_unlike_rewards": UNLEARNT,
    "paid_by_length": UNLEARNT,
    "untrained_teacher": (*UNLEARNT, "bad_start", "not_learning"),
    "decay_too_strong": (*UNLEARNT, "rate_too_large", "loss_spikes", "loss_rises", "not_learning",
                         "validation_rises"),
    "repeated_rows": ("validation_rises", "text_repeated", "held_out_trained"),
}


def examine(run):
    """Return {check name: sentence} of all findings that no other finding explains."""
    found = {}
    for check in RL if run.is_rl else TRAINING:
        if sentence := check(run):
            found[check.__name__] = sentence
    explained = {name for cause in found for name in EXPLAINS.get(cause, ())}
    return {name: sentence for name, sentence in found.items() if name not in explained}
