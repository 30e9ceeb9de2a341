"""From text to verified reasoning in one file: the four stages of this repository, small, on one core.

    python micro.py                          or python micro.py --seed=3

In most worked additions of the text a carry is forgotten, so the likeliest answer of a model that learns from
the text is wrong. Verification finds the right samples. Each section names its full-size file. B sequences,
T positions, C channels, V characters; in GRPO G questions, K samples of each.
"""
import random
import re
import sys
import zlib

import torch
from torch import nn
from torch.nn import functional as F

n_layer = 2
n_head = 4
n_embd = 64                                  # with these, 102,784 parameters
max_new_tokens = 32                          # a token is a character; the longest answer has 31
CHARACTERS = "0123456789+=: \n"              # a newline ends a document
PROMPT = len("247+385:")
FORGOTTEN = 0.75                             # share of the text's carries that are left out
SLIPS = 0.06                                 # share of its steps whose result is off by one


# --- the task: questions, worked examples and a verifier (tasks/unit_conversion.py) ---

def questions(split, n):
    """Draw n questions. A hash reserves a tenth of the sums (a + b like b + a) for the test."""
    drawn = []
    while len(drawn) < n:
        a, b = sorted(random.randint(100, 999) for _ in range(2))
        if (zlib.crc32(f"{a}+{b}".encode()) % 10 == 0) == (split == "test"):
            drawn.append(random.choice([f"{a}+{b}:", f"{b}+{a}:"]))
    return drawn


def document(question):
    """Return a question and its solution, ` 7+5=12 4+8+1=13 2+3+1=6 632`, often with wrong steps."""
    a, b = question[:-1].split("+")
    text = question
    total = ""
    carry = 0
    for x, y in zip(reversed(a), reversed(b)):
        if random.random() < FORGOTTEN:      # the common mistake
            carry = 0
        result = abs(int(x) + int(y) + carry - (random.random() < SLIPS))
        text += f" {x}+{y}{'+1' * carry}={result}"
        total = f"{result % 10}{total}"
        carry = result // 10
    return f"{text} {carry or ''}{total}\n"


def reward(question, completion):
    """Return 1.0 if the last number is the sum and every equation is true, else 0.0."""
    last_is_sum = completion.endswith(f" {sum(map(int, question[:-1].split('+')))}\n")
    equations = re.findall(r"(\d+(?:\+\d+)*)=(\d+)", completion)
    return float(last_is_sum and all(sum(map(int, a.split("+"))) == int(b) for a, b in equations))


# --- the GPT: learned positions, RMSNorm, QK-norm, squared ReLU (model.py) ---

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(n_embd, 3 * n_embd, bias=False)
        self.out = nn.Linear(n_embd, n_embd, bias=False)
        self.up = nn.Linear(n_embd, 4 * n_embd, bias=False)
        self.down = nn.Linear(4 * n_embd, n_embd, bias=False)

    def forward(self, h, cache):
        """Return h [B, T, C] after this block; cache holds the keys and values of earlier positions."""
        B, T, C = h.shape
        q, k, v = self.qkv(F.rms_norm(h, (C,))).view(B, T, 3, n_head, -1).permute(2, 0, 3, 1, 4)
        q, k = (F.rms_norm(x, x.shape[-1:]) for x in (q, k))
        if cache:
            k, v = (torch.cat(pair, 2) for pair in zip(cache, (k, v)))
        cache[:] = k, v
        y = F.scaled_dot_product_attention(q, k, v, is_causal=T > 1).transpose(1, 2)
        h = h + self.out(y.reshape(B, T, C))
        return h + self.down(F.relu(self.up(F.rms_norm(h, (C,)))).square())


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.token_embedding = nn.Embedding(len(CHARACTERS), n_embd)
        self.position_embedding = nn.Embedding(PROMPT + max_new_tokens, n_embd)
        self.blocks = nn.ModuleList(Block() for _ in range(n_layer))
        self.head = nn.Linear(n_embd, len(CHARACTERS), bias=False)

    def forward(self, x, first=0, caches=None):
        """Return the logits [B, T, V] of ids [B, T] that stand at the positions first, first + 1, ..."""
        h = self.token_embedding(x) + self.position_embedding.weight[first:first + x.shape[1]]
        for block, cache in zip(self.blocks, caches or [[] for _ in self.blocks]):
            h = block(h, cache)
        return self.head(F.rms_norm(h, (n_embd,)))


def token_logprobs(model, texts, first):
    """Return the log-probabilities [B, T - 1] of texts from position `first` on, else 0; their number."""
    x = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.long)
    y = torch.full_like(x, -100)              # a target that does not count
    for i, text in enumerate(texts):
        x[i, :len(text)] = torch.tensor([CHARACTERS.index(character) for character in text])
        y[i, first:len(text)] = x[i, first:len(text)]
    losses = F.cross_entropy(model(x[:, :-1]).transpose(1, 2), y[:, 1:], reduction="none")
    return -losses, (y != -100).sum()


@torch.no_grad()
def generate(model, asked, temperature=1):
    """Return a completion of each question at temperature 0 (greedy) or 1, in one batch (engine/)."""
    x = torch.tensor([[CHARACTERS.index(character) for character in question] for question in asked])
    caches = [[] for _ in model.blocks]
    texts = [""] * len(asked)
    for n in range(max_new_tokens):
        logits = model(x, n and PROMPT + n - 1, caches)[:, -1]
        x = logits.softmax(-1).multinomial(1) if temperature else logits.argmax(-1, keepdim=True)
        texts = [text + CHARACTERS[i] * (text[-1:] != "\n") for text, i in zip(texts, x[:, 0].tolist())]
    return texts


# --- pretraining, and fine-tuning on chosen answers (train.py) ---

def optimizer_step(optimizer, loss, lr):
    optimizer.param_groups[0]["lr"] = lr
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
    optimizer.step()


def train(model, draw, first, max_steps, learning_rate):
    """Train on the texts that draw() returns, on their characters from position `first` on."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(1, max_steps + 1):
        logprobs, n = token_logprobs(model, draw(), first)
        lr = learning_rate * min(1.0, step / 20, (max_steps + 1 - step) / (0.4 * max_steps))
        optimizer_step(optimizer, -logprobs.sum() / n, lr)
        if step % 100 == 0 or step == max_steps:
            print(f"step {step} loss {-logprobs.sum() / n:.3f}")


# --- rejection sampling (datagen.py) ---

def verified(model, asked, oversample):
    """Return the questions with their right answers among `oversample` samples, each text once."""
    samples = (pair for _ in range(oversample) for pair in zip(asked, generate(model, asked)))
    return list({question + answer: None for question, answer in samples if reward(question, answer)})


# --- reinforcement learning: GRPO (grpo.py) ---

def grpo(model, max_steps, learning_rate, prompts_per_step=32, k_samples=8):
    """Make samples above their group's mean likelier. With one step per rollout, GRPO's ratio is 1."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(1, max_steps + 1):
        asked = [question for question in questions("train", prompts_per_step) for _ in range(k_samples)]
        completions = generate(model, asked)
        rewards = torch.tensor(list(map(reward, asked, completions))).view(-1, k_samples)      # [G, K]
        advantages = rewards - rewards.mean(1, keepdim=True)
        logprobs, n = token_logprobs(model, list(map(str.__add__, asked, completions)), PROMPT)
        loss = -(advantages.view(-1, 1) * logprobs).sum() / n
        optimizer_step(optimizer, loss, learning_rate * min(step / 5, (max_steps + 1 - step) / max_steps))
        if step % 20 == 0:
            print(f"step {step} reward {rewards.mean():.3f}")


# --- the pipeline (runs/quickstart.sh) ---

def main(seed=0, base_steps=600, grpo_steps=100):
    """Run the four stages; return {model: [greedy accuracy, sampled accuracy]} on 1,000 test questions."""
    random.seed(seed)
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    test = questions("test", 1000)
    model = GPT()
    table = {}

    def evaluate(name):
        table[name] = [sum(map(reward, test, generate(model, test, t))) / len(test) for t in (0, 1)]
        print("{}: {:.1%} right greedy, {:.1%} sampled".format(name, *table[name]), flush=True)

    train(model, lambda: list(map(document, questions("train", 128))), 1, base_steps, learning_rate=4e-3)
    evaluate("base")
    rows = verified(model, questions("train", 1000), oversample=4)
    train(model, lambda: random.choices(rows, k=64), PROMPT, max_steps=15, learning_rate=1e-3)
    evaluate("rft")
    grpo(model, grpo_steps, learning_rate=5e-4)
    evaluate("grpo")
    return table


if __name__ == "__main__":
    seed = sys.argv[-1].removeprefix("--seed=") if len(sys.argv) > 1 else "0"
    main(int(seed)) if seed.isdigit() else print(__doc__)
