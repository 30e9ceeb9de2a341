"""Attention of linear cost: what a GPT with mixer=favor or linear computes in place of softmax attention.

Softmax attention gives an earlier value the weight exp(q . k / sqrt(D)). Here the weight is f(q) . f(k), a
product of positive features. So sums over earlier positions need not be computed anew for each query: the sum
of f(k) v^T is a state of constant size, which moves along the sequence (Katharopoulos et al. 2020). Features:

    favor    exp(w . x - |x|^2 / 2) for random vectors w, and x = D^-1/4 q or k; their products are
             exp(q . k / sqrt(D)) in the mean over w: FAVOR+ (Choromanski et al. 2021)
    linear   elu(x) + 1 for each channel (Katharopoulos et al. 2020)

Rules, by which a position changes the state S:

    sum      S += f(k) v^T, and a query reads f(q) S / (f(q) . sum of f(k)): a weighted mean of values
    delta    S += beta f(k) (v - f(k) S)^T: what the key reads already is replaced, as far as the write
             strength beta in (0, 1) says; features are divided by their sum, and a query reads f(q) S
             (Schlag et al. 2021)

Shapes: B sequences of T positions, H query heads, K key/value heads, G = H / K, D channels a head, M
features, N chunks of C positions, E columns of a state: by delta D, by sum one more, which sums f(k) itself.
Features, products and states are fp32 whatever the rest is.
"""
from contextlib import nullcontext
from itertools import accumulate

import torch
import torch.nn as nn
import torch.nn.functional as F

CHUNK = 64                                   # positions whose weights on one another are written out
# Added to each feature: where all of exp's are 0, a query still reads the mean of the values.
LEAST_FEATURE = 1e-6
LARGEST_EXPONENT = 60.0                      # of a key's features, sums of which fp32 has to hold
LEAST_SUM = 1e-12                            # what a query's weights add up to, where there is no key at all


# --- features ---

def n_features(config):
    return config.mixer_features if config.mixer == "favor" else config.head_dim


def first_gain(config):
    """Return what QK-norm's gains begin at.

    FAVOR+'s sum begins with queries and keys so short that no q . k / sqrt(D) is above 1, where products of
    features are near to softmax's weights: 256 of them, D = 64, are off by a tenth, at a gain of 1 by 1.9
    times. From there the model learns what pays (533 steps of studies/okadfa.py's: 1.66 nats, not 1.71). By
    delta, whose weights are not softmax's, features so much alike would leave a fifth of the output.
    """
    return config.head_dim**-0.25 if (config.mixer, config.mixer_rule) == ("favor", "sum") else 1.0


def orthogonal_vectors(n, D):
    """Draw n vectors [n, D] of which D at a time are orthogonal, each as long as one of D normal numbers.

    So they have less in common than independent ones, and each has their distribution. They are rounded to
    bf16, so that a model can be cast to it and back and still has the same features.
    """
    blocks = []
    for _ in range(-(-n // D)):
        q, r = torch.linalg.qr(torch.randn(D, D))
        lengths = torch.randn(D, D).norm(dim=1, keepdim=True)            # chi(D)
        blocks.append(lengths * (q * r.diagonal().sign()).T)             # every direction is as likely
    return torch.cat(blocks)[:n].bfloat16().float()


def favor_features(x, vectors, own_maximum, gain=None):
    """Return FAVOR+'s features [..., M] of x [..., D], fp32; vectors [M, D].

    own_maximum: whether the largest exponent of each x is subtracted, so that none overflows. That divides
    the features of an x by a number of its own, |x|^2 / 2 included, which is no matter for a query, whose
    weights are divided by their sum. Of a key it would change the weight, and a maximum over all keys would
    tell earlier positions of later ones.
    gain: [D] of the norm that x comes from, if there is one. It says how long a key is, so that |x|^2 / 2 can
    be kept out of all exponents alike, which a query's sum cancels. At a gain of 3 and 64 channels it is 36,
    and LEAST_FEATURE would be more than half of the weight.
    """
    x = x.float() * x.shape[-1]**-0.25
    exponents = x @ vectors.float().T
    if own_maximum:
        exponents = exponents - exponents.detach().amax(-1, keepdim=True)
    else:
        usual = 0.0 if gain is None else gain.detach().float().square().sum() * x.shape[-1]**-0.5
        exponents = (exponents + (usual - x.square().sum(-1, keepdim=True)) / 2).clamp(max=LARGEST_EXPONENT)
    return exponents.exp() + LEAST_FEATURE


def elu_features(x):
    """Return elu(x) + 1, fp32."""
    return F.elu(x.float()) + (1 + LEAST_FEATURE)


class Mixer(nn.Module):
    """Turns an attention layer's queries and keys into what `mix` takes.

    Rotary positions have turned them before, as softmax attention has it. So FAVOR+ weighs by the distance of
    two positions as softmax does, all features stay positive, and a position's features depend on itself
    alone: a decoded token has the same as one of a whole sequence.
    """

    def __init__(self, config):
        super().__init__()
        self.kind = config.mixer
        self.rule = config.mixer_rule
        self.vectors = None
        if self.kind == "favor":
            # A weight that is never trained, for whatever copies, shares out and saves weights to take along.
            vectors = torch.empty(config.mixer_features, config.head_dim)
            self.vectors = nn.Parameter(vectors, requires_grad=False)
        if self.rule == "delta":
            self.write = nn.Linear(config.n_embd, config.n_kv_head, bias=False)

    def draw_vectors(self):
        if self.vectors is not None and not self.vectors.is_meta:
            self.vectors.copy_(orthogonal_vectors(*self.vectors.shape))

    def forward(self, x, q, k, v, gain=None):
        """Return features of q [B, T, H, D] and k [B, T, K, D], v, and by delta write strengths [B, T, K].

        x [B, T, C]: what q, k and v were projected from. gain [D]: of the norm of keys; None: there is none.
        """
        with without_autocast(x):
            q = self.features(q, own_maximum=True)
            # Divided by their sum, a key's features lose its own factor too.
            k = self.features(k, own_maximum=self.rule == "delta", gain=gain)
        if self.rule == "sum":
            return q, k, v
        q = q / q.sum(-1, keepdim=True)
        k = k / k.sum(-1, keepdim=True)
        return q, k, v, self.write(x).float().sigmoid()

    def features(self, x, own_maximum, gain=None):
        if self.kind == "linear":
            return elu_features(x)
        return favor_features(x, self.vectors, own_maximum, gain)


def without_autocast(x):
    """Return the context in which products stay in fp32."""
    device = x.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


# --- whole sequences ---

def mix(q, k, v, write=None, state=None, lengths=None):
    """Return ([B, T, H, D] in v's dtype, the state [B, K, M, E] after the last position).

    q [B, T, H, M] and k [B, T, K, M] are features, v [B, T, K, D], write [B, T, K] the strengths of the delta
    rule; without it, it is the sum rule. state: after the positions before; None: there are none.
    lengths [B]: positions from there on are padding and leave no trace in the state.
    """
    B, T, H, M = q.shape
    K = k.shape[2]
    D = v.shape[3]
    dtype = v.dtype
    with without_autocast(v):
        v = v.float()
        if write is None:
            v = F.pad(v, (0, 1), value=1.0)  # sums the keys' features as it does the values
        if state is None:
            state = v.new_zeros(B, K, M, v.shape[3])
        if T == 0:
            return v.new_zeros(B, 0, H, D, dtype=dtype), state
        if lengths is not None:
            padding = torch.arange(T, device=v.device) >= lengths[:, None]
            k = k.masked_fill(padding[:, :, None, None], 0.0)
        k = in_chunks(k)
        v = in_chunks(v)
        q = in_chunks(q).unflatten(1, (K, H // K))
        q = q.permute(0, 1, 3, 2, 4, 5).flatten(3, 4)                    # [B, K, N, G C, M]
        if write is None:
            y, state = sum_chunks(q, k, v, state)
        else:
            y, state = delta_chunks(q, k, v, in_chunks(write[..., None]), state)
        y = y.unflatten(3, (H // K, -1)).permute(0, 2, 4, 1, 3, 5)       # [B, N, C, K, G, E]
        y = y.flatten(1, 2)[:, :T].flatten(2, 3)
        if write is None:
            y = weighted_mean(y)
    return y.to(dtype), state


def in_chunks(x):
    """Return x [B, T, heads, n] in chunks [B, heads, N, C, n], the last one filled up with zeros."""
    B, T, heads, n = x.shape
    C = CHUNK if T > CHUNK else T
    if T % C:
        x = F.pad(x, (0, 0, 0, 0, 0, C - T % C))
    return x.unflatten(1, (-1, C)).permute(0, 3, 1, 2, 4)


def weighted_mean(y):
    """Divide sums over values by those over their weights, which are the last column of y [..., D + 1]."""
    return y[..., :-1] / y[..., -1:].clamp(min=LEAST_SUM)


def causal_weights(q, k):
    """Return q . k [..., G C, C] of the positions in a chunk, 0 for later ones."""
    C = k.shape[-2]
    return (q @ k.mT).unflatten(-2, (-1, C)).tril().flatten(-3, -2)


def sum_chunks(q, k, v, state):
    """Return what queries q [B, K, N, G C, M] read [B, K, N, G C, E], and the last state [B, K, M, E].

    k [B, K, N, C, M], v [B, K, N, C, E]. Queries read the state before their chunk, and of the chunk what the
    weights say.
    """
    states = running_sums(state, k.mT @ v)
    y = causal_weights(q, k) @ v + q @ states[:, :, :-1]
    return y, states[:, :, -1]


def running_sums(state, written):
    """Return the states [B, K, N + 1, M, E] before each chunk and after the last.

    state [B, K, M, E]; written [B, K, N, M, E]: what each chunk adds. A GPU's cumsum does not add in the same
    order each time. A CPU's goes through memory M E numbers at a time: both ways it takes 2 to 4 times as
    long as adding one chunk to the next (4 heads, 256 features, 4 to 256 chunks, one Zen 5 core).
    """
    if torch.are_deterministic_algorithms_enabled() or not (written.is_cuda or torch.compiler.is_compiling()):
        return torch.stack(list(accumulate((state, *written.unbind(2)))), 2)
    return torch.cat((state[:, :, None], written), 2).cumsum(2)


def delta_chunks(q, k, v, write, state):
    """Return the same by the delta rule; write [B, K, N, C, 1].

    Position t writes u_t = beta_t (v_t - k_t S), where S is the state before its chunk and what the chunk's
    earlier positions wrote. So U solves (1 + beta L) U = beta (V - K S_before), where L holds the products
    k_t . k_s below the diagonal: a triangular system (Yang et al. 2024). It is linear in S_before, so that it
    is solved for V and for K in all chunks at once, and what is left to do in turn are products.
    """
    below = (write * (k @ k.mT)).tril(-1)
    right = write * torch.cat((v, k), -1)
    solved = torch.linalg.solve_triangular(below, right, upper=False, unitriangular=True)
    move = move_state
    if torch.compiler.is_compiling():
        move = torch.compiler.disable(move)  # whose loop it would unroll, anew for each T
    return move(q, k, causal_weights(q, k), *solved.split((v.shape[-1], k.shape[-1]), -1), state)


def move_state(q, k, weights, of_values, of_state, state):
    """Return what delta_chunks does, of the solutions for V [B, K, N, C, D] and K [B, K, N, C, M].

    The tensors are taken apart at once. The gradient of x[:, :, n] would be as large as x for each n, which
    made the cost grow with the square of T: a layer at 16,384 positions took 4.3 times as long.
    """
    y = []
    chunks = zip(*(x.unbind(2) for x in (q, k, weights, of_values, of_state)))
    for q, k, weights, of_values, of_state in chunks:
        written = of_values - of_state @ state
        y.append(q @ state + weights @ written)
        state = state + k.mT @ written
    return torch.stack(y, 2), state


# --- one position, and rows that continue prompts ---

def mix_step(q, k, v, write=None, *, state):
    """Return [B, 1, H, D] of the next position, and move the state [B, K, M, E] along, in place.

    q [B, 1, H, M], k [B, 1, K, M], v [B, 1, K, D], write [B, 1, K], as `mix` has them.
    """
    B, _, H, M = q.shape
    K, D = v.shape[2:]
    dtype = v.dtype
    state = state.view(B * K, M, -1)
    q = q.reshape(B * K, H // K, M)
    k = k.reshape(B * K, 1, M)
    v = v.float().reshape(B * K, 1, D)
    if write is None:
        v = F.pad(v, (0, 1), value=1.0)
    else:
        v = write.reshape(B * K, 1, 1) * (v - k @ state)
    state.baddbmm_(k.mT, v)
    y = q @ state
    if write is None:
        y = weighted_mean(y)
    return y.view(B, 1, H, D).to(dtype)


class PromptMixing:
    """Does in a sequence of G prompts and then B rows that continue them what model.PromptAttention does: a
    prompt's last state is where each of its rows begins."""

    def __init__(self, prompts):
        self.prompts = prompts

    def __call__(self, *inputs):
        """Return [1, G P + B T, H, D] of what `mix` takes for one sequence of so many positions."""
        G, P = self.prompts.ids.shape
        B = len(self.prompts.of)
        of_prompts = [x[0, :G * P].unflatten(0, (G, P)) for x in inputs]
        of_rows = [x[0, G * P:].unflatten(0, (B, -1)) for x in inputs]
        prompt_y, state = mix(*of_prompts, lengths=self.prompts.lengths)
        row_y, _ = mix(*of_rows, state=state.index_select(0, self.prompts.of))
        return torch.cat((prompt_y.flatten(0, 1), row_y.flatten(0, 1)))[None]


# --- what it costs ---

def state_shape(config):
    """Return (K, M, E) of a layer's state."""
    columns = config.head_dim + (config.mixer_rule == "sum")
    return config.n_kv_head, n_features(config), columns


def flops_per_token(config):
    """Return the FLOPs of forward and backward pass of a layer's features and `mix`, whatever T is.

    Without the causal halving, as GPT.flops_per_token counts softmax attention.
    """
    K, M, E = state_shape(config)
    H = config.n_head
    # Weights and what is read by them; the state, read and written.
    products = H * (CHUNK * (M + E) + M * E) + K * M * E
    if config.mixer_rule == "delta":
        # L, the triangular system, K S.
        products += K * (CHUNK * M + CHUNK * (M + E) // 2 + M * E)
    flops = 6 * products
    if config.mixer == "favor":              # whose vectors take no gradient
        flops += 4 * (H + K) * M * config.head_dim
    return flops
