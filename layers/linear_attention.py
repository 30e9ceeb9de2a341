"""Linear attention: the replacement for softmax attention in a GPT with mixer=favor or linear.

Softmax attention gives an earlier value the weight exp(q . k / sqrt(D)). Linear attention gives it
f(q) . f(k) with positive features f, so that the sum of f(k) v^T over earlier positions is a state of
constant size, shared by all queries (Katharopoulos et al. 2020). Features:

    favor    exp(w . x - |x|^2 / 2) for random vectors w and x = D^-1/4 q or k; the mean of their products
             over w is exp(q . k / sqrt(D)): FAVOR+ (Choromanski et al. 2021)
    linear   elu(x) + 1 for each channel (Katharopoulos et al. 2020)

Rules for updating the state S at a position:

    sum      S += f(k) v^T, and a query reads f(q) S / (f(q) . sum of f(k)): a weighted mean of values
    delta    S += beta f(k) (v - f(k) S)^T replaces the value stored under the key, to the extent of the write
             strength beta in (0, 1); features are divided by their sum, and a query reads f(q) S
             (Schlag et al. 2021)

Shapes: B sequences of T positions, H query heads, K key/value heads, G = H / K, D channels a head, M
features, N chunks of C positions, E columns of a state: D for delta, D + 1 for sum, whose last column sums
f(k). Features, products and states are always fp32."""
from contextlib import nullcontext
from itertools import accumulate

import torch
import torch.nn as nn
import torch.nn.functional as F

CHUNK = 64                                   # positions with explicit weights on each other
MIN_FEATURE = 1e-6                           # added to features: if all exps are 0, a query reads the mean
MAX_EXPONENT = 60.0                          # of a key's features, so that their sums fit fp32
MIN_WEIGHT_SUM = 1e-12                       # for a query without any key


# --- features ---

def n_features(config):
    return config.mixer_features if config.mixer == "favor" else config.head_dim


def initial_qk_gain(config):
    """Return the initial gain of QK-norm.

    FAVOR+ with sum starts with short queries and keys, so that every q . k / sqrt(D) is at most 1 and
    products of features approximate softmax's weights: with 256 features and D = 64 the error is 0.1 instead
    of 1.9 times the weight at a gain of 1. Training adapts the gain (533 steps of docs/okadfa.md's model:
    1.66 instead of 1.71 nats). With delta, whose weights are not softmax's, such similar features would leave
    a fifth of the output."""
    return config.head_dim**-0.25 if (config.mixer, config.mixer_rule) == ("favor", "sum") else 1.0


def orthogonal_vectors(n, D):
    """Draw n vectors [n, D], orthogonal in groups of D, with lengths as of standard normal vectors.

    Each is distributed like an independent vector, but they overlap less. They are rounded to bf16, so that
    casting a model to bf16 and back keeps its features."""
    blocks = []
    for _ in range(-(-n // D)):
        q, r = torch.linalg.qr(torch.randn(D, D))
        lengths = torch.randn(D, D).norm(dim=1, keepdim=True)            # chi(D)
        blocks.append(lengths * (q * r.diagonal().sign()).T)             # uniform over directions
    return torch.cat(blocks)[:n].bfloat16().float()


def favor_features(x, vectors, own_maximum, gain=None):
    """Return FAVOR+ features [..., M] of x [..., D], fp32; vectors [M, D].

    own_maximum: subtract each x's largest exponent against overflow. This scales an x's features (|x|^2 / 2
    included) by its own factor, which cancels in a query's normalised weights. For a key it would change the
    weight, and a maximum over all keys would leak later positions into earlier ones.
    gain: [D] of the norm that produced x, or None. It gives the keys' usual length, so that |x|^2 / 2 can be
    removed from all exponents alike, which cancels for a query. At a gain of 3 and 64 channels it is 36, and
    MIN_FEATURE would be more than half of the weight."""
    x = x.float() * x.shape[-1]**-0.25
    exponents = x @ vectors.float().T
    if own_maximum:
        exponents = exponents - exponents.detach().amax(-1, keepdim=True)
    else:
        expected = 0.0 if gain is None else gain.detach().float().square().sum() * x.shape[-1]**-0.5
        exponents = (exponents + (expected - x.square().sum(-1, keepdim=True)) / 2).clamp(max=MAX_EXPONENT)
    return exponents.exp() + MIN_FEATURE


class Mixer(nn.Module):
    """Compute features of an attention layer's queries and keys for `mix`.

    Queries and keys are already rotated, as in softmax attention. FAVOR+ therefore weighs by distance as
    softmax does, all features stay positive, and a position's features depend only on that position: they are
    the same in decoding and in a full sequence."""

    def __init__(self, config):
        super().__init__()
        self.kind = config.mixer
        self.rule = config.mixer_rule
        self.vectors = None
        if self.kind == "favor":
            # A frozen parameter, so that it is copied, sharded and saved like other weights.
            vectors = torch.empty(config.mixer_features, config.head_dim)
            self.vectors = nn.Parameter(vectors, requires_grad=False)
        if self.rule == "delta":
            self.write = nn.Linear(config.n_embd, config.n_kv_head, bias=False)

    def draw_vectors(self):
        if self.vectors is not None and not self.vectors.is_meta:
            self.vectors.copy_(orthogonal_vectors(*self.vectors.shape))

    def forward(self, x, q, k, v, gain=None):
        """Return features of q [B, T, H, D] and k [B, T, K, D], v, and for delta write strengths [B, T, K].

        x [B, T, C]: the input of the projections. gain [D]: of the keys' norm, or None."""
        with without_autocast(x):
            q = self.features(q, own_maximum=True)
            # For delta, dividing by the sum cancels a key's own factor too.
            k = self.features(k, own_maximum=self.rule == "delta", gain=gain)
        if self.rule == "sum":
            return q, k, v
        q = q / q.sum(-1, keepdim=True)
        k = k / k.sum(-1, keepdim=True)
        return q, k, v, self.write(x).float().sigmoid()

    def features(self, x, own_maximum, gain=None):
        if self.kind == "linear":
            return F.elu(x.float()) + (1 + MIN_FEATURE)
        return favor_features(x, self.vectors, own_maximum, gain)


def without_autocast(x):
    """Return a context in which products stay in fp32."""
    device = x.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


# --- whole sequences ---

def mix(q, k, v, write=None, state=None, lengths=None):
    """Return ([B, T, H, D] in v's dtype, the state [B, K, M, E] after the last position).

    q [B, T, H, M] and k [B, T, K, M] are features, v is [B, T, K, D].
    write: [B, T, K], strengths of the delta rule; None: the sum rule.
    state: after the preceding positions; None: zero.
    lengths: [B]; later positions are padding and don't change the state."""
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
    """Return x [B, T, heads, n] in zero-padded chunks [B, heads, N, C, n]."""
    B, T, heads, n = x.shape
    C = CHUNK if T > CHUNK else T
    if T % C:
        x = F.pad(x, (0, 0, 0, 0, 0, C - T % C))
    return x.unflatten(1, (-1, C)).permute(0, 3, 1, 2, 4)


def weighted_mean(y):
    """Divide sums of values by the sum of their weights, the last column of y [..., D + 1]."""
    return y[..., :-1] / y[..., -1:].clamp(min=MIN_WEIGHT_SUM)


def causal_weights(q, k):
    """Return q . k [..., G C, C] between the positions of a chunk, 0 for later ones."""
    C = k.shape[-2]
    return (q @ k.mT).unflatten(-2, (-1, C)).tril().flatten(-3, -2)


def sum_chunks(q, k, v, state):
    """Return the queries' results [B, K, N, G C, E] and the last state [B, K, M, E].

    q [B, K, N, G C, M], k [B, K, N, C, M], v [B, K, N, C, E]. A query reads the state before its chunk and
    the causal weights within it."""
    states = running_sums(state, k.mT @ v)
    y = causal_weights(q, k) @ v + q @ states[:, :, :-1]
    return y, states[:, :, -1]


def running_sums(state, written):
    """Return the states [B, K, N + 1, M, E] before each chunk and after the last.

    state [B, K, M, E]; written [B, K, N, M, E]: each chunk's sum. A GPU's cumsum is not deterministic. A
    CPU's cumsum strides by M E numbers: forward and backward it takes 2 to 4 times as long as this loop (4
    heads, 256 features, 4 to 256 chunks, one Zen 5 core)."""
    if torch.are_deterministic_algorithms_enabled() or not (written.is_cuda or torch.compiler.is_compiling()):
        return torch.stack(list(accumulate((state, *written.unbind(2)))), 2)
    return torch.cat((state[:, :, None], written), 2).cumsum(2)


def delta_chunks(q, k, v, write, state):
    """Return the results of sum_chunks for the delta rule; write [B, K, N, C, 1].

    Position t writes u_t = beta_t (v_t - k_t S), where S is the state before its chunk plus the chunk's
    earlier writes. So U solves (1 + beta L) U = beta (V - K S_before), where L holds the products k_t . k_s
    below the diagonal: a triangular system (Yang et al. 2024). It is linear in S_before, so it is solved for
    V and K in all chunks at once, and only products remain sequential."""
    below = (write * (k @ k.mT)).tril(-1)
    right = write * torch.cat((v, k), -1)
    solved = torch.linalg.solve_triangular(below, right, upper=False, unitriangular=True)
    move = move_state
    if torch.compiler.is_compiling():
        move = torch.compiler.disable(move)  # Dynamo would unroll its loop for each T
    return move(q, k, causal_weights(q, k), *solved.split((v.shape[-1], k.shape[-1]), -1), state)


def move_state(q, k, weights, value_solution, state_solution, state):
    """Return the results of delta_chunks from the solutions for V [B, K, N, C, D] and K [B, K, N, C, M].

    The tensors are unbound once: the gradient of each x[:, :, n] would be as large as x, a cost that grows
    with T squared (4.3 times as long for a layer at 16,384 positions)."""
    y = []
    chunks = zip(*(x.unbind(2) for x in (q, k, weights, value_solution, state_solution)))
    for q, k, weights, value_solution, state_solution in chunks:
        written = value_solution - state_solution @ state
        y.append(q @ state + weights @ written)
        state = state + k.mT @ written
    return torch.stack(y, 2), state


# --- one position, and rows that continue prompts ---

def mix_step(q, k, v, write=None, *, state):
    """Return [B, 1, H, D] of the next position and update the state [B, K, M, E] in place.

    q [B, 1, H, M], k [B, 1, K, M], v [B, 1, K, D] and write [B, 1, K] are as in `mix`."""
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
    """The linear counterpart of model.PromptAttention: each row starts from its prompt's last state."""

    def __init__(self, prompts):
        self.prompts = prompts

    def __call__(self, *inputs):
        """Return [1, G P + B T, H, D] from the arguments of `mix` for one sequence of that length."""
        G, P = self.prompts.ids.shape
        B = len(self.prompts.prompt_index)
        prompt_inputs = [x[0, :G * P].unflatten(0, (G, P)) for x in inputs]
        row_inputs = [x[0, G * P:].unflatten(0, (B, -1)) for x in inputs]
        prompt_y, state = mix(*prompt_inputs, lengths=self.prompts.lengths)
        row_y, _ = mix(*row_inputs, state=state.index_select(0, self.prompts.prompt_index))
        return torch.cat((prompt_y.flatten(0, 1), row_y.flatten(0, 1)))[None]


# --- sizes and FLOPs ---

def state_shape(config):
    """Return (K, M, E) of a layer's state."""
    return config.n_kv_head, n_features(config), config.head_dim + (config.mixer_rule == "sum")


def flops_per_token(config):
    """Return FLOPs per token of forward and backward pass of a layer's features and `mix`, for any T.

    They are not halved for causality, as in GPT.flops_per_token."""
    K, M, E = state_shape(config)
    H = config.n_head
    # Weights and weighted sums within a chunk; reading and writing the state.
    products = H * (CHUNK * (M + E) + M * E) + K * M * E
    if config.mixer_rule == "delta":
        # The products L, the triangular system, K S.
        products += K * (CHUNK * M + CHUNK * (M + E) // 2 + M * E)
    flops = 6 * products
    if config.mixer == "favor":              # its vectors have no gradient
        flops += 4 * (H + K) * M * config.head_dim
    return flops
