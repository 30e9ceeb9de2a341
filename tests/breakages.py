"""Break runs of train.py and grpo.py on purpose, leave others healthy, and tabulate the doctor's findings.

    OMP_NUM_THREADS=1 python tests/breakages.py out/breakages
    OMP_NUM_THREADS=1 python tests/breakages.py out/breakages --only=one_prompt,sft_labels_shifted
    python tests/breakages.py out/breakages --judge            the doctor again, over the stored metrics

Each run is a process of the real script with real options, and its fault is one that a user would make: a
flag, a data file, a reward, or a line of code (a wrapper that replaces one function).
`hear` is the sentence that its user needs; it and the patterns were written before the doctor had seen the run,
and patterns that let another cause pass were narrowed afterwards. The verdict: named (a finding matches
`named`), half (it matches `half`: a symptom, not the cause), wrong (none of the findings match), missed (no
finding); of a healthy run none or FALSE ALARM. Read the sentences too: a run that is named may have a wrong
finding besides. A run takes 20 to 60 seconds of one core; one that has metrics.jsonl is not repeated.
"""
import json
import lzma
import os
import random
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

TRAIN = ("batch_size=32 max_steps=50 optimizer=adamw learning_rate=1e-3 lr_schedule=cosine warmup_steps=6 "
         "log_interval=5 eval_interval=20 save_interval=1000")
TEXT = ("n_layer=2 n_head=2 n_embd=64 block_size=128 batch_size=16 max_steps=120 log_interval=5 eval_interval=30 "
        "eval_tokens=4096 save_interval=1000")
GRPO = ("prompts_per_step=8 k_samples=8 max_new_tokens=48 max_steps=24 learning_rate=1e-4 eval_interval=8 "
        "eval_questions=40 reward_workers=1 save_interval=1000")

REWARD = '''
import re

def reward(question, completion):
    numbers = re.findall(r"\\d+", completion)
    return float(bool(numbers) and numbers[-1] == question["answer"])
'''
WRAPPER = '''import {script}
from runtime import guard

{patch}

if __name__ == "__main__":
    guard.run({script}.main)
'''


@dataclass
class Trial:
    name: str
    script: str                              # train or grpo
    fault: str                               # in a few words; "" for a healthy run
    hear: str = ""                           # the sentence that the user needs
    named: str = "(?!)"                      # pattern of a finding that names the fault
    half: str = "(?!)"                       # pattern of one that names a symptom
    model: str = None                        # init_from; None: adder for grpo, base for train, "scratch"
    options: str = ""                        # override TRAIN, TEXT or GRPO
    files: dict = field(default_factory=dict)         # {name: text}, in the trial's folder of data
    patch: str = ""                          # Python, before main runs


# --- data ---

def sums(n, seed=0, low=10, high=99, wrong=0.0):
    """Return [(question, answer, completion)] of sums of two numbers, each asked once, with steps."""
    rng = random.Random(seed)
    asked = set()
    while len(asked) < n:
        asked.add((rng.randint(low, high), rng.randint(low, high)))
    rows = []
    for a, b in sorted(asked, key=lambda _: rng.random()):
        total = a + b + (rng.choice([-10, -1, 1, 10]) if rng.random() < wrong else 0)
        steps = f"{a - a % 10} + {b - b % 10} = {a - a % 10 + b - b % 10}, {a % 10} + {b % 10} = {a % 10 + b % 10}"
        rows.append((f"{a} + {b}", str(a + b), f"{steps}, so {total}"))
    return rows


def lines(objects):
    return "".join(json.dumps(row) + "\n" for row in objects)


def examples(rows, prompt="Question: {}\n"):
    return lines({"prompt": prompt.format(q), "completion": c} for q, _, c in rows)


def questions(rows):
    return lines({"prompt": q, "answer": a} for q, a, _ in rows)


def reversals(n, seed=0, low=3, high=6):
    """Return [(question, answer, completion)] of words to reverse."""
    rng = random.Random(seed)
    words = set()
    while len(words) < n:
        words.add("".join(rng.choices("abcdefghij", k=rng.randint(low, high))))
    return [(w, w[::-1], w[::-1]) for w in sorted(words, key=lambda _: rng.random())]


def shakespeare():
    return lzma.open(ROOT / "tests/tinyshakespeare.txt.xz", "rt").read()


def shifted(rows):
    """Return the rows with the completions of their successors."""
    return [(q, a, rows[(i + 1) % len(rows)][2]) for i, (q, a, _) in enumerate(rows)]


# --- trials ---

ASK = questions(sums(600, seed=7))
TEACH = examples(sums(1500, seed=1))
LICENCE = ("Permission is granted to use, copy and distribute this text for any purpose and without fee, provided that "
           "the above notice appears in all copies. The text is provided as is, without warranty of any sort, express "
           "or implied; in no event shall the authors be liable for any claim or damages, whether in an action of "
           "contract or otherwise, arising from the use of the text. Neither the name of the library nor the names of "
           "its contributors may be used to endorse products derived from this text without written permission.\n")

BROKEN = [
    # the data of train.py
    Trial("text_one_row_800", "train", "a text of one row, 800 times",
          "The text repeats itself: one row makes up all of it.", "same|repeat|duplicat|identical|distinct",
          "memoris|nothing left|epoch", "scratch", TEXT,
          {"text.jsonl": lines([{"text": "The quick brown fox jumps over the lazy dog near the river bank."}] * 800)}),
    Trial("sft_one_row_800", "train", "one row of examples, 800 times",
          "All examples are the same.", "same|repeat|duplicat|identical|distinct", "memoris|nothing left",
          options="valid_share=0", files={"rows.jsonl": examples(sums(1) * 800)}),
    Trial("valid_is_train", "train", "the validation text is the training text, many epochs",
          "The validation text is part of the training text, so the validation loss says nothing.",
          "validation (text|set|split|data).*(same|equal|part of|contain|seen)|leak|overlap",
          "memoris|epochs|passes", "scratch",
          TEXT + " max_steps=250 eval_tokens=2048 learning_rate=0.02 n_embd=128",
          {"t/train.txt": shakespeare()[:6000], "t/valid.txt": shakespeare()[:6000]}),
    Trial("sft_labels_shifted", "train", "each question has the next one's answer",
          "Prompts and completions do not belong together: the loss stays where guessing leaves it.",
          "labels|belong|shuffl|mismatch|unrelated|not depend on the prompt",
          "plateau|stopped|not fall|stays|no longer",
          files={"rows.jsonl": examples(shifted(sums(1500, seed=1)))}, options="valid_share=0.1"),
    Trial("sft_same_answer", "train", "every completion is the same (a column mixed up)",
          "All completions are the same text.", "same|identical|one completion|distinct",
          "memoris|nothing left",
          files={"rows.jsonl": examples([(q, a, "40 + 30 = 70, 7 + 5 = 12, so 82") for q, a,
          _ in sums(1500)])},
          options="valid_share=0.1"),
    Trial("sft_answer_in_prompt", "train", "the answer stands in the prompt",
          "The completion can be read off the prompt: the loss is near zero at once.",
          "prompt.*(answer|contain)|copied|read off|(answer|completion)s?.*prompt",
          "nothing left|too easy|near zero",
          files={"rows.jsonl": lines({"prompt": f"Question: {q}\n{c}\nAnswer: ", "completion": c}
                                     for q, a, c in sums(1500))}, options="valid_share=0.1 max_steps=100"),
    Trial("sft_few_rows", "train", "40 rows for 60 epochs",
          "The model memorises: 40 examples, seen 60 times; validation loss rises.",
          "memoris|overfit|validation loss (rises|rose|is rising)|more data", "epochs|passes",
          files={"rows.jsonl": examples(sums(40))}, options="valid_share=0.2 max_steps=80 eval_interval=8"),
    Trial("sft_rate_high", "train", "learning rate of 0.3 (AdamW)",
          "The learning rate is too large.", "lower.*(rate|learning_rate)|rate.*too (large|high)|diverg",
          "not fall|rose|rises",
          files={"rows.jsonl": TEACH}, model="small", options="valid_share=0.1 learning_rate=0.3"),
    Trial("sft_rate_low", "train", "learning rate of 1e-7",
          "The learning rate is too small: the loss does not move.",
          "(raise|higher).*rate|rate.*too (small|low)",
          "not fall|does not move|stays|hardly", files={"rows.jsonl": TEACH}, model="small",
          options="valid_share=0.1 learning_rate=1e-7"),
    Trial("weight_decay_30", "train", "weight decay of 30",
          "The weight decay is too strong: the weights shrink.", "weight.decay", "not fall|rose|rises|norm",
          options="valid_share=0.1 weight_decay=30 learning_rate=3e-3", files={"rows.jsonl": TEACH}),
    # rewards and the loss of grpo.py
    Trial("grpo_answer_in_prompt", "grpo", "the answer stands in the prompt (a hint left in it)",
          "The answer stands in the prompt.",
          "(answer|solution).*in (the|its|their) (prompt|question)|copie[sd].*prompt",
          "too easy|solved", files={"reward.py": REWARD, "questions.jsonl": lines(
              {"prompt": f"{q} (so {a})", "answer": a} for q, a, _ in sums(600, seed=7))},
          model="hinted"),
    Trial("advantages_of_another_group", "grpo", "each group gets the advantages of the next",
          "Advantages do not belong to the rewards of their group.", "advantage",
          "not rise|no progress|stays|falls|fell",
          options="learning_rate=5e-4", patch="""original = grpo.set_advantages

def rolled(cfg, groups):
    original(cfg, groups)
    values = [[c.advantage for c in group] for group in groups]
    for group, row in zip(groups, values[1:] + values[:1]):
        for c, advantage in zip(group, row):
            c.advantage = advantage
grpo.set_advantages = rolled"""),
    Trial("falls_with_length", "grpo", "the reward falls with the length and ignores the answer",
          "The reward pays for short completions, right or not: no answer is right, and length falls while it rises.",
          "(short|length).*(pay|reward|paid)|(pay|reward|paid).*(short|length)",
          "0%|never right|no answer is right|length",
          files={"reward.py": "def reward(question, completion):\n    return max(0.0, 0.95 - len(completion) / 60)\n"}, options="learning_rate=5e-4"),
    Trial("one_prompt", "grpo", "one prompt a step",
          "One prompt a step: the gradient is that of one question; raise --prompts_per_step.",
          "prompts_per_step|one (prompt|question|group)|single (prompt|question)",
          "noise|zero variance|no gradient",
          options="prompts_per_step=1 max_steps=40 learning_rate=5e-4"),
    Trial("one_answer", "grpo", "the reward pays for one text whatever the question",
          "One text is the answer to every question: the reward is gamed.",
          "same (text|completion|answer)|one (text|answer|completion)",
          "entropy|collapse",
          files={"reward.py": "def reward(question, completion):\n    words = ['so 1', '0 + ', ', 7', '= 10', '5 =']\n"
                              "    return sum(w in completion for w in words) / 5\n"},
                              options="max_steps=40 learning_rate=1e-3"),
    Trial("shuffled_rewards", "grpo", "rewards come back in another order",
          "The same text to the same question is paid differently: rewards are mixed up or random.",
          "(same|equal|identical).*(text|completion).*(different|other)|shuffl|mixed up|random",
          "not rise|too hard|stays",
options="learning_rate=5e-4", patch="""import random
original = grpo.group_by_question

def shuffled(cfg, completions, positions):
    rng = random.Random(len(completions))
    grades = [c.grade for c in completions]
    rng.shuffle(grades)
    for c, grade in zip(completions, grades):
        c.grade = grade
    return original(cfg, completions, positions)
grpo.group_by_question = shuffled"""),
    Trial("untrained_teacher", "grpo", "the teacher is an untrained model",
          "The teacher is worse than the student (its own text is unlikely to it): it is untrained or the wrong one.",
          "teacher", "KL|kl ", options="teacher={models}/untrained beta=1 reward_weight=0 learning_rate=5e-4 max_steps=12 eval_interval=4"),
    Trial("greedy_falls", "grpo", "each question is new; sampled accuracy rises and greedy accuracy falls",
          "Sampled accuracy rises and greedy falls: lower the temperature or the learning rate (not memorised).",
          "(greedy|held-out).*lower.*(temperature|rate)", "held-out|valid|greedy",
          options="learning_rate=2.5e-4 max_steps=30 eval_interval=5"),
    Trial("truncated_30", "grpo", "a quarter to a third of the completions are cut off",
          "About 30% of the completions are cut off at --max_new_tokens and get no reward: raise it.",
          "cut off|max_new_tokens|truncat", "length", model="mixed_lengths", options="max_new_tokens=36",
          files={"questions.jsonl": questions(sums(400, seed=7) + sums(200, seed=8, low=1000, high=9999))}),
    Trial("few_questions", "grpo", "16 questions, 32 times each",
          "The same 16 questions are asked again and again: answers are memorised; more questions.",
          "memoris|(few|same|repeated) questions|more questions|epochs", "zero variance|solved",
          files={"questions.jsonl": questions(sums(18, seed=7))},
          options="max_steps=36 eval_interval=9 learning_rate=1e-3"),
    Trial("rate_high", "grpo", "learning rate of 0.05",
          "The learning rate is too large: the policy collapsed.",
          "lower.*rate|rate.*too (large|high)", "fell|falls|collapse|KL|clip",
          options="learning_rate=0.05 max_steps=15"),
    Trial("rate_low", "grpo", "learning rate of 1e-9", "The learning rate is too small: nothing changes.",
          "(raise|higher).*rate|rate.*too (small|low)", "not rise|no progress|stays|nothing changes",
          options="learning_rate=1e-9 max_steps=18"),
    Trial("constant_reward", "grpo", "the reward is always 1",
          "Every completion gets the same reward: nothing to learn.",
          "same reward|all.*(reward|score)|constant|zero variance|no group", "no gradient|solved|too easy",
          files={
              "reward.py": "def reward(question, completion):\n    return 1.0\n"}, options="max_steps=12"),
    Trial("random_reward", "grpo", "the reward is random",
          "The same text is paid differently: the reward is random.",
          "(same|equal|identical).*(text|completion).*(different|other)|random|noise",
          "not rise|too hard|stays", files={
              "reward.py": "import os\n\ndef reward(question, completion):\n    return float(os.urandom(1)[0] < 128)\n"}, options="learning_rate=5e-4"),
    Trial("raises_for_a_quarter", "grpo", "the verifier raises for a quarter of the completions",
          "A quarter of the completions could not be graded: the verifier raises.",
          "(verifier|grad).*(fail|error|raise|exception)|(fail|error|exception).*(verifier|grad)|without a grade", "error",
          files={"reward.py": REWARD.replace("return", "if sum(completion.encode()) % 4 == 0:\n"
                                             "        raise ValueError('no number')\n    return")},
                                             options="max_steps=14"),
    Trial("cold", "grpo", "temperature 0.01",
          "At temperature 0.01 a group's completions are equal: raise it.",
          "temperature", "same text|entropy|agree", options="temperature=0.01 max_steps=10"),
    Trial("hot", "grpo", "temperature 3", "At temperature 3 the model samples noise: lower it.",
          "temperature", "0%|entropy|too hard|cut off",
          options="temperature=3 max_steps=15 learning_rate=5e-4"),
    Trial("wrong_prompt_form", "grpo", "prompts in a form that the model has never seen",
          "No completion is right: the prompts' form is not that of training (or the questions are too hard).",
          "prompt|form|template", "too hard|0%|no reward|never", files={
              "reward.py": REWARD + "\nPROMPT = '### Instruction:\\n{}\\n### Response:\\n'\n"},
              options="max_steps=15 learning_rate=5e-4"),
    Trial("stale_engine", "grpo", "the engine keeps the first weights",
          "The engine samples from old weights: its logprobs leave the trainer's.",
          "engine|stale|old weights|logprob", "KL|clip|gap", options="learning_rate=5e-4",
          patch="""from engine import Engine
Engine.load = lambda self, model: None"""),
    Trial("engine_temperature", "grpo", "the engine samples at another temperature than the loss assumes",
          "Engine and trainer disagree on logprobs from the first step: temperatures differ.",
          "engine|logprob|temperature", "KL|clip|gap", options="learning_rate=5e-4",
          patch="""import dataclasses
make = grpo.make_engine

def make_engine(cfg, *rest):
    return make(dataclasses.replace(cfg, temperature=1.6), *rest)
grpo.make_engine = make_engine"""),
    Trial("kl_weight_10", "grpo", "KL weight of 10",
          "--beta=10 learning_rate=5e-4 holds the model at its start: lower it.",
          "beta|KL.*weight|weight.*KL", "not rise|KL|stays", options="beta=10"),
    Trial("entropy_collapse", "grpo", "a high rate and a high clip until the entropy is gone",
          "The entropy has collapsed: samples of a group agree; lower the rate or raise the temperature.",
          "entropy|collapse", "zero variance|same", options="learning_rate=4e-3 max_steps=30 temperature=0.8 "
          "inner_epochs=2 clip_high=2", files={"questions.jsonl": questions(sums(100, seed=7))}),
    Trial("pays_length", "grpo", "the reward grows with the length",
          "The reward pays for length: completions grow until they are cut off.",
          "(long|length).*(pay|reward|paid)|(pay|reward|paid).*(long|length)",
          "cut off|length|max_new_tokens", files={
              "reward.py": "def reward(question, completion):\n    return min(1.0, len(completion) / 200)\n"},
          options="max_new_tokens=96 max_steps=25 learning_rate=1e-3"),
]

OWN = [
    Trial("lower_cased", "grpo", "the model writes lower case and the verifier compares with capitals",
          "No completion is ever right though all are answered: the verifier and the completions' form disagree.",
          "verifier|form|case|look at|samples|compare|read", "0%|no reward|too hard|never", files={
              "reward.py": "def reward(question, completion):\n    return float(question['answer'] in completion)\n",
              "questions.jsonl": lines({"prompt": q, "answer": a.upper()} for q, a, _ in reversals(400,
              seed=5))},
          model="reverser", options="max_new_tokens=12 max_steps=20"),
    Trial("trailing_space", "grpo", "a blank more at the end of the prompt than in training",
          "The prompt differs from that of training.", "prompt|form|space", "0%|too hard|no reward|fell",
          files={"reward.py": REWARD + "\nPROMPT = 'Question: {}\\n '\n"}, options="max_steps=12"),
    Trial("prompt_trained", "train", "the mask is off: prompts are trained on too",
          "Prompt tokens are targets: too many of the tokens are trained on.",
          "mask|prompt.*(target|train)|targets", "(?!)",
          files={"rows.jsonl": TEACH}, model="small", options="valid_share=0.1",
          patch="""from text import examples
original = examples.example_of_parts

def unmasked(parts, *rest):
    return original([(ids, True) for ids, _ in parts], *rest)
examples.example_of_parts = unmasked"""),
    Trial("frozen_layers", "grpo", "every layer but the norms is frozen",
          "Most weights do not train: they are frozen.",
          "frozen|trainable|do not (train|change|move)|grad", "not rise|no progress|stays|rate",
          patch="""make = grpo.build_model

def frozen(*args):
    model = make(*args)
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.ndim < 2)
    return model
grpo.build_model = frozen"""),
    Trial("test_in_train", "train",
          "the held-out questions are training questions, written with another blank",
          "Held-out questions are in the training set as well, but for blanks.",
          "held.out|duplicat|same question|leak|blank",
          "memoris|epochs|passes", files={"rows.jsonl": examples(
              [(q.replace(" ", blank), a, c) for q, a, c in sums(60) for blank in (" ", "  ", "   ",
              "    ")])},
          model="small", options="valid_share=0.2 max_steps=90"),
    Trial("reward_of_a_hundredth", "grpo", "the reward is in [0, 0.01]",
          "Rewards are tiny: advantages are a hundredth of the usual.",
          "reward.*(small|tiny|range|scale|0\\.01|most)|scale|advantage", "not rise|stays|grad", files={
              "reward.py": REWARD.replace("float(", "0.01 * float(")}, options="max_steps=14"),
    Trial("groups_of_two", "grpo", "two samples a question",
          "Groups of two seldom differ: raise --k_samples.",
          "k_samples|group size|more samples", "zero variance|noise|no gradient",
          options="k_samples=2 prompts_per_step=16 max_steps=40"),
    Trial("valid_other_domain", "train", "a sorted text: the last tenth is of another kind",
          "Training and validation text differ in kind: the split is not random.",
          "(split|validation).*(differ|another|other|unlike|kind|domain|distribution)",
          "validation|overfit|memoris", "scratch", TEXT,
          {"text.txt": shakespeare()[:400_000] + "".join(f"{(i * 7919) % 10007};{(i * i) % 9973};{i % 89}\n" for i in range(4000))}),
    Trial("no_end", "grpo", "the model was fine-tuned without the end token",
          "Completions never end: all are cut off.",
          "cut off|max_new_tokens|end token|never end|truncat", "length", model="endless",
          options="max_new_tokens=64 max_steps=12"),
    Trial("truncated_rows", "train", "rows cut after 12 characters by an export",
          "Completions end in the middle: all are equally long.",
          "cut|truncat|length|short", "(?!)", files={"rows.jsonl": examples([(q, a, c[:12]) for q, a,
          c in sums(1500, seed=1)])},
          model="small", options="valid_share=0.1"),
    Trial("dropout_0.9", "train", "dropout of 0.9", "Dropout is too high.", "dropout",
          "not fall|stays|validation|training loss",
          files={"rows.jsonl": TEACH}, model="small", options="valid_share=0.1 dropout=0.9"),
    Trial("sign_inverted", "grpo", "the reward is 1 for wrong answers",
          "The reward rises while fewer answers are right: its sign is wrong.",
          "sign|invert|wrong answers|negat", "(?!)", files={"reward.py": REWARD.replace("return float(",
          "return 1 - float(")}, options="max_steps=20 learning_rate=3e-4"),
    Trial("slow_verifier", "grpo", "a verifier of 0.02 s in one worker, longer than sampling",
          "Most of the time goes to the verifier: more --reward_workers.",
          "reward_workers|verifier.*(slow|time|seconds)|wait", "time",
          files={"reward.py": REWARD.replace("import re", "import re\nimport time").replace(
              "    numbers", "    time.sleep(0.025)\n    numbers")}, options="max_steps=12"),
    Trial("warmup_of_1000", "train", "a warm-up longer than the run",
          "The run ends in the warm-up: the rate never reached its peak.",
          "warm", "rate|not fall|stays", files={"rows.jsonl": TEACH}, model="small",
          options="valid_share=0.1 warmup_steps=1000 lr_schedule=constant"),
    Trial("answers_of_the_next", "grpo", "the answers' column is shifted by a row",
          "Correct completions are graded wrong: questions and answers do not belong together.",
          "answers?.*(belong|column|shift|match)|verifier|look at", "never right|never_right",
          files={"questions.jsonl": questions([(q, b, c) for (q, _, c), (_, b, _) in zip(
              sums(600, seed=7), sums(600, seed=7)[1:] + sums(1, seed=3))])}, options="max_steps=15"),
    Trial("compressed_text", "train", "a .txt that holds compressed bytes as Latin-1",
          "The text has no structure: its loss stays at that of random characters.",
          "random|structure|compress|binary|encod", "not fall|stays|plateau|no longer", "scratch", TEXT,
          {"text.txt": "".join(chr(0xA1 + random.Random(i).randrange(94)) for i in range(60_000))}),
    Trial("all_masked", "grpo", "--overlong=mask where nearly all are cut off",
          "Nearly all completions are cut off and masked: almost none train.",
          "cut off|max_new_tokens|mask|truncat", "no gradient|zero variance",
          options="max_new_tokens=28 overlong=mask max_steps=12"),
    Trial("half_empty_rows", "train", "two thirds of the completions are empty",
          "Most completions are empty: the model learns to say nothing.",
          "empty|say nothing|end token|no text|short", "(?!)", files={"rows.jsonl": examples(
              [(q, a, c if i % 3 == 0 else " ") for i, (q, a, c) in enumerate(sums(1500, seed=1))])},
              model="small", options="valid_share=0.1"),
    Trial("pays_format", "grpo", "nine tenths of the reward are for the word 'so'",
          "The format is paid and the answer hardly: the reward is at 0.9 whatever is right.",
          "same (reward|score)|format|hardly|parts?|zero variance", "solved|too easy|0%|no gradient",
          files={"reward.py": REWARD.replace("return float(",
          "return 0.9 * ('so' in completion) + 0.1 * float(")}, options="max_steps=20"),
]

# Written, with their patterns, before the checks were ever run on them: the figure of their first run is the one
# that says how the checks do on a fault that nobody has prepared them for (docs/diagnosis.md).
UNSEEN = [
    Trial("clip_tiny", "train", "--grad_clip=1e-8",
          "--grad_clip is far below the gradient norm: every step is scaled down to nothing; raise it.",
          "grad_clip|clip", "rate|not fall|stays|does not move", files={"rows.jsonl": TEACH}, model="small",
          options="valid_share=0.1 grad_clip=1e-8"),
    Trial("betas_swapped", "train", "beta1=0.999 and beta2=0.9",
          "beta1=0.999 averages gradients over a thousand steps: it was swapped with beta2.",
          "beta1|beta2|momentum", "rate|not fall|rose|rises|plateau", files={"rows.jsonl": TEACH},
          options="valid_share=0.1 beta1=0.999 beta2=0.9 max_steps=80 learning_rate=3e-3"),
    Trial("boilerplate_40", "train", "two fifths of the text are one licence",
          "Two fifths of the text are the same passage: remove it.",
          "same|repeat|duplicat|identical|boilerplate", "memoris|low", "scratch", TEXT,
          {"text.jsonl": lines([{"text": shakespeare()[i * 1500:][:900] + "\n" + LICENCE} for i in range(300)])}),
    Trial("untrained_start", "train", "fine-tuning starts from a model that was never trained",
          "The model to fine-tune knows nothing: its first loss is that of guessing.",
          "untrained|(start|initial|first|init_from).*(guess|random|untrained|trained)|guess.*(start|initial|first|init_from)",
          "not fall|loss", files={"rows.jsonl": TEACH}, model="untrained", options="valid_share=0.1"),
    Trial("lora_rate_high", "train", "adapters at a learning rate of 1",
          "The learning rate is too large.", "lower.*(rate|learning_rate)|rate.*too (large|high)|diverg",
          "not fall|rose|rises", files={"rows.jsonl": TEACH}, model="adder",
          options="valid_share=0.1 lora_rank=8 learning_rate=1"),
    Trial("rows_contradict", "train", "each question stands there five times, with five different totals",
          "The same prompt has different answers: rows contradict each other.",
          "(same|one|equal|identical|each|a) (prompt|question).*(differ|several|other)|contradict|conflict|disagree",
          "not fall|stays|plateau|no longer|memoris", model="adder", options="valid_share=0.1 max_steps=80",
          files={"rows.jsonl": examples([(q, a, str(int(a) + shift)) for q, a, _ in sums(400, seed=1)
                                         for shift in (-20, -3, 0, 7, 40)])}),
    Trial("rows_left_out", "train", "two thirds of the rows are longer than block_size",
          "Two thirds of the rows are longer than --block_size and left out: raise it.",
          "block_size|left out|dropped|longer than", "memoris|epochs|passes|more data", model="small",
          options="valid_share=0.1 block_size=56",
          files={"rows.jsonl": examples(sums(500, seed=1) + sums(1000, seed=4, low=1000, high=9999))}),
    Trial("valid_share_90", "train", "valid_share=0.9, meant as the share to train on",
          "Nine tenths of the rows are held out and a few dozen are left to train on: lower --valid_share.",
          "valid_share|held out.*(most|nine|90)|(most|nine|90).*held out", "memoris|overfit|epochs|passes|more data",
          files={"rows.jsonl": examples(sums(400, seed=1))}, options="valid_share=0.9 max_steps=70"),
    Trial("targets_unshifted", "train", "targets are the inputs, not the next tokens",
          "The loss is near zero at once: each target stands in the input.",
          "target|shift|leak|see[sn]? the|copie|already in", "nothing left|too easy|near zero|memoris", "scratch", TEXT,
          {"text.txt": shakespeare()[:300_000]}, """from model import GPT
original = GPT.loss
GPT.loss = lambda self, x, y, *rest: original(self, x, x, *rest)"""),
    Trial("no_zero_grad", "train", "gradients are not cleared between steps",
          "Gradients add up over the steps: zero_grad is missing.",
          "zero_grad|accumulat|add up|not (cleared|reset|zeroed)", "norm|rate|rose|rises|not fall|plateau",
          "scratch", TEXT + " optimizer=adamw learning_rate=5e-3 grad_clip=0", {"text.txt": shakespeare()[:300_000]},
          "import torch\ntorch.optim.Optimizer.zero_grad = lambda self, set_to_none=True: None"),
    Trial("same_batch", "train", "each step gets the first batch",
          "Every step trains on the same batch: training loss falls and validation loss rises within one epoch.",
          "same (batch|rows|data|text|tokens)|one batch|loader|repeat", "memoris|overfit|validation loss", "scratch",
          TEXT, {"text.txt": shakespeare()[:300_000]}, """from text import data
original = data.batches
data.batches = lambda dataset, steps, *rest: original(dataset, [0 for _ in steps], *rest)"""),
    Trial("first_number", "grpo", "the verifier reads the first number instead of the last",
          "No completion is paid, though right answers stand in them: the verifier reads the wrong place.",
          "verifier|read|look at|samples", "0%|no reward|too hard|never",
          files={"reward.py": REWARD.replace("numbers[-1]", "numbers[0]")}, options="max_steps=14"),
    Trial("times_out", "grpo", "the verifier hangs on one completion in twenty",
          "One in twenty completions has no grade: the verifier ran out of time.",
          "tim(e|ed).?out|out of time|hang|kill|(verifier|grad).*(fail|error)|without a grade|could not be graded",
          "error|slow|wait", options="max_steps=12 timeout=0.2", files={"reward.py": REWARD.replace(
              "import re", "import re\nimport time").replace(
              "    numbers", "    if sum(completion.encode()) % 20 == 0:\n        time.sleep(60)\n    numbers")}),
    Trial("inner_epochs_16", "grpo", "sixteen passes over each step's completions",
          "The policy moves too far within a step: lower --inner_epochs or the learning rate.",
          "inner_epochs|passes over", "clip|KL|rate|entropy|collapse|fell", options="inner_epochs=16 learning_rate=1e-3 "
          "max_steps=14 eval_interval=5"),
    Trial("too_hard", "grpo", "four digits, for a model that adds two",
          "The questions are too hard: no completion is right; start from easier ones or fine-tune first.",
          "too hard|easier|harder|difficult", "0%|no reward|never|no group|zero variance",
          files={"questions.jsonl": questions(sums(400, seed=8, low=1000, high=9999))},
          options="max_steps=12 max_new_tokens=64"),
    Trial("pays_equations", "grpo", "the reward counts equality signs",
          "The reward rises while the answers are no longer right: it pays for equality signs.",
          "(reward|paid|pays?).*(answer|right|correct|true)|gamed|hack", "length|entropy|cut off|0%",
          files={"reward.py": "def reward(question, completion):\n    return min(1.0, completion.count('=') / 8)\n"},
          options="learning_rate=1e-3 max_steps=30"),
    Trial("half_sign_wrong", "grpo", "the reward is inverted where the answer is odd",
          "For part of the questions wrong answers are paid: the reward contradicts itself.",
          "sign|invert|wrong answers|negat", "not rise|no progress|stays|fell|falls|never right",
          files={"reward.py": REWARD.replace("    return float(", "    right = (").replace(
              "answer\"])", "answer\"])\n    return float(right != int(question[\"answer\"]) % 2)")},
          options="learning_rate=5e-4"),
    Trial("answers_as_floats", "grpo", "answers are written as 75.0 by a spreadsheet",
          "No completion is paid: answers read 75.0 and completions 75.",
          "verifier|form|compare|look at|samples|read", "0%|no reward|too hard|never", options="max_steps=12",
          files={"questions.jsonl": questions([(q, a + ".0", c) for q, a, c in sums(600, seed=7)])}),
    Trial("lora_alpha_tiny", "grpo", "adapters with lora_alpha=0.001",
          "The adapters are scaled by a ten-thousandth: raise --lora_alpha or the learning rate.",
          "lora_alpha|adapter|(raise|higher).*rate|rate.*too (small|low)", "not rise|no progress|stays|nothing changes",
          options="lora_rank=8 lora_alpha=0.001 max_steps=18"),
    Trial("teacher_is_student", "grpo", "the teacher is the model itself",
          "The teacher is the model itself: the divergence is zero and nothing trains.",
          "teacher", "KL|no gradient|not rise|no progress|stays|rate",
          options="teacher={models}/adder beta=1 reward_weight=0 max_steps=12"),
    Trial("identical_samples", "grpo", "all samples of a question get the same random numbers",
          "All completions of a group are the same text: the random numbers are.",
          "same (text|completion|noise|random)|identical|equal|seed", "zero variance|no gradient|entropy|same reward|no group",
          options="max_steps=12", patch="""from engine import generate
original = generate.stream
generate.stream = lambda seed, keys, indices: original(seed, keys, 0 * indices)"""),
    Trial("advantages_negated", "grpo", "the sign of the advantages is wrong",
          "Completions above their group's mean become less likely: the loss has the wrong sign.",
          "sign|advantage|negat", "not rise|no progress|fell|falls|rate", options="learning_rate=3e-4",
          patch="""original = grpo.advantages
grpo.advantages = lambda *args: -original(*args)"""),
    Trial("temperature_0.2", "grpo", "a temperature of 0.2",
          "At temperature 0.2 the samples of a group agree: raise it.", "temperature", "same text|entropy|agree|zero variance",
          options="temperature=0.2 max_steps=20"),
    Trial("missing_newline", "grpo", "the prompt lacks the line end of training",
          "The prompt differs from that of training.", "prompt|form|template", "0%|too hard|no reward|fell|never",
          files={"reward.py": REWARD + "\nPROMPT = 'Question: {}'\n"}, options="max_steps=12"),
    Trial("noise_amplified", "grpo", "rewards of a group differ by a thousandth, divided by their deviation",
          "Rewards hardly differ and --advantage_scale=group makes their noise as large as any advantage.",
          "advantage_scale|(reward|score)s?.*(hardly|little|tiny|thousandth|nearly the same|small)", "zero variance|not rise",
          files={"reward.py": "def reward(question, completion):\n"
                              "    return 0.5 + 0.0003 * (sum(completion.encode()) % 7)\n"},
          options="advantage_scale=group learning_rate=5e-4 max_steps=20"),
]


def other_settings():
    """Yield healthy trials in settings that `healthy` lacks, written together with UNSEEN."""
    yield Trial("ok_gpt2_form", "train", "", model="scratch", files={"text.txt": shakespeare()[500_000:800_000]},
                options=TEXT + " norm=layernorm position=learned mlp=gelu optimizer=adamw learning_rate=4e-3")
    yield Trial("ok_paragraphs", "train", "", model="scratch", options=TEXT + " batch_size=8 block_size=64 max_steps=200",
                files={"text.jsonl": lines([{"text": p} for p in shakespeare()[:300_000].split("\n\n")])})
    mixed = examples(sums(600, seed=31)) + examples(reversals(600, seed=32), "Reverse the word {}: ")
    yield Trial("ok_two_tasks", "train", "", files={"rows.jsonl": mixed}, options="valid_share=0.1 dropout=0.05 max_steps=70")
    yield Trial("ok_long_and_short", "train", "", model="adder", options="valid_share=0.15 learning_rate=5e-4 max_steps=60 "
                "gradient_accumulation_steps=2 batch_size=16", files={"rows.jsonl": examples(
                    sums(500, seed=33) + sums(500, seed=34, low=1000, high=9999) + sums(90, seed=35, low=1, high=12))})
    yield Trial("ok_parts_paid", "grpo", "", options="k_samples=16 prompts_per_step=6 advantage_scale=group",
                files={"reward.py": REWARD.replace("return float(", "return 0.2 * (', so ' in completion) + 0.8 * float(")})
    yield Trial("ok_inner_epochs", "grpo", "", options="inner_epochs=2 beta=0.02 temperature=0.9 lr_schedule=cosine")
    yield Trial("ok_both_lengths", "grpo", "", model="mixed_lengths", options="max_new_tokens=72 overlong=penalty "
                "overlong_tokens=8 optimizer=muon max_steps=16", files={"questions.jsonl": questions(
                    sums(400, seed=7) + sums(100, seed=8, low=100, high=999))})


def healthy():
    """Yield the healthy trials."""
    rng = random.Random(0)
    for i in range(25):
        rate = rng.choice([3e-4, 6e-4, 1e-3, 2e-3])
        rows = rng.choice([300, 600, 1200, 2400])
        kind = rng.choice([sums, reversals])
        model = "adder" if i % 5 == 4 and kind is sums else "base" if i % 5 == 2 else "small"
        options = (f"learning_rate={rate} batch_size={rng.choice([16, 32])} seed={i} valid_share={rng.choice([0.05, 0.1, 0.2])} "
                   f"max_steps={rng.choice([30, 45, 60])} eval_interval={rng.choice([5, 10, 20])} "
                   f"lr_schedule={rng.choice(['cosine', 'linear', 'wsd'])}")
        yield Trial(f"ok_sft_{i:02}", "train", "", model=model, options=options,
                    files={"rows.jsonl": examples(kind(rows, seed=100 + i))})
    for i in range(3):
        yield Trial(f"ok_add_{i}", "grpo", "", options=f"seed={i} learning_rate={[5e-5, 1e-4, 2e-4][i]}")
        yield Trial(f"ok_reverse_{i}", "grpo", "", model="reverser",
          options=f"seed={i} max_new_tokens=12 max_steps=30",
                    files={"questions.jsonl": questions(reversals(600, seed=20 + i)), "reward.py":
                           "def reward(question, completion):\n    return float(completion.strip() == question['answer'])\n"})
    yield Trial("ok_graded", "grpo", "", model="reverser", options="max_new_tokens=12 max_steps=30",
                files={"questions.jsonl": questions(reversals(600, seed=9, high=8)), "reward.py":
                       "def reward(question, completion):\n    want = question['answer']\n"
                       "    return sum(a == b for a, b in zip(completion, want)) / max(len(want), len(completion))\n"})
    yield Trial("ok_lora", "grpo", "", options="lora_rank=8 learning_rate=1e-3")
    yield Trial("ok_sft_lora", "train", "", model="adder", files={"rows.jsonl": TEACH},
                options="valid_share=0.1 lora_rank=8 learning_rate=3e-3")
    yield Trial("ok_muon", "train", "", files={"rows.jsonl": TEACH},
          options="valid_share=0.1 optimizer=muon learning_rate=5e-3")
    yield Trial("ok_small_kl", "grpo", "", options="beta=0.01 seed=4")
    yield Trial("ok_teacher", "grpo", "",
          options="teacher={models}/taught beta=1 reward_weight=0 max_steps=15")
    yield Trial("ok_minibatches", "grpo", "", options="mini_batches=2 loss_type=dr_grpo max_steps=20")
    yield Trial("ok_dynamic", "grpo", "", options="dynamic_sampling=true max_steps=15")
    for i in range(3):
        yield Trial(f"ok_text_{i}", "train", "", model="scratch",
          options=TEXT + f" seed={i} learning_rate={[3e-3, 5e-3, 1e-2][i]}",
                    files={"text.txt": shakespeare()[i * 200_000:][:300_000]})
    for i in range(2):
        yield Trial(f"ok_base_{i}", "train", "", model="scratch",
          options="dataset=task:unit_conversion seed=%d max_steps=120 "
                    "n_head=4 n_kv_head=1 block_size=128 batch_size=16 log_interval=10 eval_interval=60 eval_tokens=8192 "
                    "learning_rate=0.01" % i)
    yield Trial("ok_units", "grpo", "", model="quickstart",
          options="task=unit_conversion num_questions=100 prompts_per_step=8 "
                "max_new_tokens=144 max_steps=12 temperature=1.3 eval_questions=24 eval_interval=6")


# --- models that trials start from ---

def models(folder):
    """Return {name: arguments of train.py} in the order in which they are made."""
    add = f"--dataset={folder}/add.jsonl --init_from={{models}}/base --max_steps=240 --learning_rate=3e-3"
    return {
        "base": "--dataset=task:unit_conversion --n_head=4 --n_kv_head=1 --max_steps=200",
        "small": "--dataset=task:unit_conversion --n_layer=2 --n_embd=64 --batch_size=16 --block_size=128 --max_steps=300",
        "adder": add,
        "reverser": f"--dataset={folder}/reverse.jsonl --init_from={{models}}/base --max_steps=150 --learning_rate=2e-3 "
                    "--batch_size=64",
        "hinted": f"--dataset={folder}/hinted.jsonl --init_from={{models}}/adder --max_steps=60 --learning_rate=2e-3",
        "mixed_lengths": f"--dataset={folder}/mixed.jsonl --init_from={{models}}/adder --max_steps=60 --learning_rate=2e-3",
        "taught": f"--dataset={folder}/right.jsonl --init_from={{models}}/adder --max_steps=40 --learning_rate=1e-3",
        "endless": f"--dataset={folder}/endless.jsonl --init_from={{models}}/adder --max_steps=40 --learning_rate=2e-3",
        "untrained": "--dataset=task:unit_conversion --n_head=4 --n_kv_head=1 --max_steps=1 --learning_rate=1e-6",
    }


def make_models(out, wanted):
    folder = out / ".models"
    folder.mkdir(parents=True, exist_ok=True)
    noisy = sums(4000, seed=2, wrong=0.15)
    texts = {"add": examples(noisy), "reverse": examples(reversals(4000, seed=2, low=3, high=6)),
             "hinted": examples([(f"{q} (so {a})", a, c) for q, a, c in sums(1500, seed=3)]),
             "mixed": examples(noisy[:1500] + sums(1500, seed=4, low=1000, high=9999)),
             "right": examples(sums(3000, seed=6)),
             "endless": examples([(q, a, c + "\n" + 12 * "so ") for q, a, c in noisy])}
    for name, text in texts.items():
        (folder / f"{name}.jsonl").write_text(text)
    for name, arguments in models(folder).items():
        if name in wanted and not (folder / name / "metrics.jsonl").exists():
            common = "--optimizer=adamw --lr_schedule=cosine --warmup_steps=10 --save_interval=1000" if "init_from" in arguments else ""
            call(["train.py", *f"{arguments} {common} --out_dir={folder}/{name} --data_dir={out}/.data".format(
                models=folder).split(), "--overwrite"], folder / f"{name}.log")


# --- running and judging ---

def call(arguments, log):
    """Run Python in the project, write its output to `log`, and return the exit code and the seconds."""
    start = time.monotonic()
    with open(log, "w") as f:
        code = subprocess.run([sys.executable, *arguments], cwd=ROOT, stdout=f, stderr=subprocess.STDOUT,
                              env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=3600).returncode
    return code, time.monotonic() - start


def parse(text):
    return dict(pair.split("=", 1) for pair in text.split())


def command(out, trial):
    """Write the trial's files and return its arguments."""
    files = out / ".files" / trial.name
    shutil.rmtree(files, ignore_errors=True)
    files.mkdir(parents=True)
    contents = dict(trial.files)
    options = parse({"train": TRAIN, "grpo": GRPO}[trial.script])
    if trial.model == "scratch":
        options = {}
    options |= parse(trial.options)
    if trial.script == "grpo" and "task" not in options:
        contents = {"reward.py": REWARD, "questions.jsonl": ASK} | contents
        options |= {"task": files / "reward.py", "dataset": files / "questions.jsonl"}
    elif trial.script == "train" and "dataset" not in options:
        contents = contents or {"rows.jsonl": TEACH}
        options["dataset"] = files / next(iter(contents)).split("/")[0]
    for name, text in contents.items():
        (files / name).parent.mkdir(parents=True, exist_ok=True)
        (files / name).write_text(text)
    script = f"{trial.script}.py"
    if trial.patch:
        script = files / f"broken_{trial.script}.py"
        script.write_text(WRAPPER.format(script=trial.script, patch=trial.patch))
    if trial.script == "train":
        options["data_dir"] = files / "data"
    if trial.model != "scratch":
        options["init_from"] = "{models}/" + start_of(trial)
    options["out_dir"] = out / trial.name
    flags = [f"--{k}={v}".format(models=out / ".models") for k, v in options.items()]
    return [str(script), *flags, "--overwrite"]


def start_of(trial):
    """Return the name of the trial's first model, or None."""
    if trial.model == "scratch":
        return None
    return {None: "adder" if trial.script == "grpo" else "base", "quickstart": "base"}.get(trial.model,
          trial.model)


def run(out, trial):
    """Run a trial unless its metrics are stored."""
    folder = out / trial.name
    if (folder / "command").exists() and (folder / "metrics.jsonl").exists():
        return
    teacher = re.search(r"models}/(\w+)", trial.options)
    make_models(out, {"base", "adder", start_of(trial), *(teacher.groups() if teacher else ())})
    arguments = command(out, trial)
    code, seconds = call(arguments, out / f"{trial.name}.log")
    print(f"{trial.name}: {seconds:.0f} s, exit code {code}", flush=True)
    if folder.exists():
        (folder / "command").write_text("python " + " ".join(arguments) + "\n")
        (out / f"{trial.name}.log").rename(folder / "output.txt")


def list_trials(out, trials):
    """Write README.txt: what is broken in each run, and the sentence that its user needs."""
    text = "Runs made by tests/breakages.py: NAME, its fault, and the sentence that its user needs to hear.\n\n"
    for t in trials:
        ready = "" if (out / t.name / "command").exists() else " (not run yet)"
        text += f"{t.name}{ready}: {t.fault or 'healthy: no finding'}\n" + (f"    {t.hear}\n" if t.hear else "")
    (out / "README.txt").write_text(text)


def diagnose(folders):
    """Return [findings of each run folder], as `python -m doctor` prints them with --json."""
    result = subprocess.run([sys.executable, "-m", "doctor", *map(str, folders), "--json"], cwd=ROOT,
                            capture_output=True, text=True)
    if result.returncode not in (0, 3):
        raise SystemExit(f"doctor: exit code {result.returncode}\n{result.stderr}")
    return [json.loads(line)["findings"] for line in result.stdout.splitlines() if line.startswith("{")]


def verdict(trial, findings):
    sentences = [f"{f['name']}: {f['sentence']}" for f in findings]
    if not trial.fault:
        return "FALSE ALARM" if sentences else "none"
    for word, pattern in (("named", trial.named), ("half", trial.half)):
        if any(re.search(pattern, sentence, re.I) for sentence in sentences):
            return word
    return "wrong" if sentences else "missed"


def judge(out, trials):
    """Print the doctor's findings and the verdict for each stored run, then the count of each verdict."""
    counts = {}
    trials = [t for t in trials if (out / t.name / "metrics.jsonl").exists()]
    for trial, findings in zip(trials, diagnose([out / t.name for t in trials]), strict=True):
        word = verdict(trial, findings)
        group = "healthy" if not trial.fault else next(name for name, group in (
            ("own", OWN), ("unseen", UNSEEN), ("listed", BROKEN)) if trial in group)
        counts.setdefault(group, []).append(word)
        print(f"{trial.name:28} {word:12} {trial.fault}")
        for f in findings:
            until = f" to {f['until']}" if f["until"] is not None else ""
            print(f"    {f['name']}, step {f['since']}{until}: {f['sentence']}")
    for group, words in counts.items():
        print(f"{group}: {len(words)} runs: " + ", ".join(f"{words.count(w)} {w}" for w in sorted(set(words))))


def main(argv):
    out = Path(next(a for a in argv if not a.startswith("--"))).resolve()
    only = [name for a in argv if a.startswith("--only=") for name in a[7:].split(",")]
    everything = {t.name: t for t in [*BROKEN, *OWN, *UNSEEN, *healthy(), *other_settings()]}
    trials = [everything[name] for name in only or everything]
    if "--judge" not in argv:
        for trial in trials:
            run(out, trial)
            list_trials(out, everything.values())
    judge(out, trials)


if __name__ == "__main__":
    main(sys.argv[1:])
