"""The GPT. One definition spans GPT-2 and the modern decoders; imports torch alone.

Shapes: B sequences, T positions, C = n_embd channels, H query heads, K key/value heads, D channels a head, V vocabulary.
The from-scratch default follows what small-model speed runs settled on: RMSNorm, rotary positions (Su et al. 2021),
QK-norm (Henry et al. 2020), squared ReLU (So et al. 2021), zero-initialised output projections, untied head.
"""
import inspect
import math
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

IGNORE = -1                                  # a target that is not trained on; set from lengths, never from token ids
LINEARS = ("qkv", "out", "up", "gate", "down")       # of a block; what LoRA adapts
LOGITS_AT_A_TIME = {"cpu": 2**25, "cuda": 2**27}     # elements of a chunk of logits: 128 MiB, 512 MiB in fp32
LOGPROBS = 2**25                             # of log-probabilities over all ids that are kept for the backward pass; more are computed
LOGPROBS_AT_A_TIME = {"cpu": 2**23, "cuda": 2**25}   # in such chunks, and there again. Up to four such tensors exist at once


NUMBERS = (int, float)
# {what fields of GPTConfig should be: (their names, whether a value is that)}; or None, where that is the default.
RULES = {
    "a whole number from 1 to 2**31 - 1": ("vocab_size block_size n_head n_embd n_kv_head head_dim mlp_hidden",
                                           lambda value: type(value) is int and 0 < value < 2**31),
    "a whole number from 1 to 1,000": ("n_layer", lambda value: type(value) is int and 0 < value <= 1000),
    "a number above 0": ("norm_eps rope_theta", lambda value: type(value) in NUMBERS and 0 < value < math.inf),
    "a number of at least 0": ("logit_softcap dropout", lambda value: type(value) in NUMBERS and 0 <= value < math.inf),
    "true or false": ("qk_norm qkv_bias o_bias mlp_bias tied_head", lambda value: type(value) is bool),
    "rmsnorm or layernorm": ("norm", ("rmsnorm", "layernorm").__contains__),
    "rope or learned": ("position", ("rope", "learned").__contains__),
    "relu2, gelu, gelu_tanh or swiglu": ("mlp", ("relu2", "gelu", "gelu_tanh", "swiglu").__contains__),
    "an object": ("rope_scaling", lambda value: type(value) is dict),
}


@dataclass
class GPTConfig:
    vocab_size: int = 50257                  # real ids; the weights are padded to a multiple of 64
    block_size: int = 1024                   # longest sequence, tokens
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    n_kv_head: int | None = None             # None: as many as n_head; fewer is grouped-query attention
    head_dim: int | None = None              # None: n_embd / n_head
    mlp_hidden: int | None = None            # None: 4 n_embd, or 8/3 n_embd rounded up to 64 with swiglu
    norm: str = "rmsnorm"                    # rmsnorm | layernorm
    norm_eps: float = 1e-5
    position: str = "rope"                   # rope | learned
    rope_theta: float = 10000.0
    rope_scaling: dict | None = None         # {"rope_type": "linear" or "llama3", "factor": ...}, for contexts past the trained
    qk_norm: bool = True                     # RMSNorm of each query and key head, before the rotation
    mlp: str = "relu2"                       # relu2 | gelu (exact, nanoGPT's) | gelu_tanh (GPT-2's) | swiglu
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    tied_head: bool = False                  # the head shares the token embedding's weights
    logit_softcap: float = 0.0               # logits = cap * tanh(logits / cap); 0: off
    dropout: float = 0.0

    def __post_init__(self):
        """Fills in what is None; ValueError for what can't be computed, whatever file it was read from."""
        for rule, (names, holds) in RULES.items():
            for name in names.split():
                value = getattr(self, name)
                if not holds(value) and (value is not None or getattr(GPTConfig, name) is not None):
                    raise ValueError(f"{name}={str(value)[:80]} should be {rule}")
        _, *known = inspect.signature(scaled).parameters
        for key, value in (self.rope_scaling or {}).items():
            number = type(value) in NUMBERS and 0 < value < math.inf
            if key not in known or not (value in ("linear", "llama3") if key == "rope_type" else number):
                raise ValueError(f"rope_scaling has {key[:80]}={str(value)[:80]}, which is not computed here")
        if not self.head_dim and self.n_embd % self.n_head:
            raise ValueError(f"n_embd={self.n_embd} is not divisible by n_head={self.n_head}")
        self.n_kv_head = self.n_kv_head or self.n_head
        self.head_dim = self.head_dim or self.n_embd // self.n_head
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_head={self.n_head} is not divisible by n_kv_head={self.n_kv_head}")
        if self.position == "rope" and self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd, and rotary positions turn channels in pairs")
        wide = -(-8 * self.n_embd // (3 * 64)) * 64 if self.mlp == "swiglu" else 4 * self.n_embd
        self.mlp_hidden = self.mlp_hidden or wide

    @property
    def padded_vocab_size(self):
        return -(-self.vocab_size // 64) * 64


class NormOnCPU(torch.autograd.Function):
    """x [..., D] / root of the mean square, times gain [..., D], and backward in few passes over memory, where that of F.rms_norm on a CPU
    takes twenty (both ways, 8192 x 128 in bf16: 1.3 ms instead of 2.5, two Zen 5 cores)."""

    @staticmethod
    def forward(ctx, x, gain, eps):
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
        scale, g = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_().to(x.dtype), gain.to(x.dtype)
        normed = x * scale
        ctx.save_for_backward(normed, scale, g)
        ctx.dtype = gain.dtype
        return normed * g

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        normed, scale, g = ctx.saved_tensors
        p = dy * normed
        dgain = p.flatten(0, -1 - g.ndim).sum(0).to(ctx.dtype) if ctx.needs_input_grad[1] else None
        along = (p * g).sum(-1, keepdim=True)                            # of the gradient, which the norm takes out
        return torch.addcmul(dy * g, normed, along, value=-1 / normed.shape[-1]).mul_(scale), dgain, None


def rms_norm(x, gain, eps):
    """gain [D], or one for each head [H, D]. In the engine, where no gradient will be asked for, F.rms_norm is as fast on a CPU."""
    in_engine = not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()              # which Dynamo can't ask
    if x.device.type == "cpu" and not in_engine:
        return NormOnCPU.apply(x, gain, eps)
    shape, gain, autocast = x.shape[-1:], gain.to(x.dtype), torch.is_autocast_enabled(x.device.type)         # one dtype: the fused kernel,
    with torch.autocast(x.device.type, enabled=False) if autocast else nullcontext():                  # of which a GPU's autocast makes fp32
        return F.rms_norm(x, shape, gain, eps) if gain.ndim == 1 else F.rms_norm(x, shape, eps=eps) * gain


class RMSNorm(nn.RMSNorm):
    def forward(self, x):
        return rms_norm(x, self.weight, self.eps)


class SquaredReLU(torch.autograd.Function):
    """relu(x)^2. Backward is one pass over memory instead of three (both ways, 8192 x 512 in bf16: 1.2 ms instead of 2.3, two Zen 5
    cores)."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(positive := F.relu(x))
        return positive.square()

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        positive, = ctx.saved_tensors
        return torch.addcmul(dy.new_zeros(()), dy, positive, value=2)


def make_norm(config):
    kind = {"rmsnorm": RMSNorm, "layernorm": nn.LayerNorm}[config.norm]
    return kind(config.n_embd, eps=config.norm_eps)


def rotate(x, cos, sin):
    """Rotary embedding, halves layout (as Llama's): x [B, T, heads, D], cos and sin [T, 1 or heads, D] as `GPT.turns` gives them. Three
    kernels, where the two halves written out would be seven."""
    a, b = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat((b, a), dim=-1), sin)


def scaled(rate, rope_type=None, factor=1.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192):
    """Rotary rates [D/2], radians a position, for contexts `factor` times as long as those trained on. linear: all divided by
    it (Chen et al. 2023); llama3: only those that turn rarely in the original context, with a ramp between (Llama 3.1)."""
    if rope_type != "llama3":
        return rate / factor
    turns = original_max_position_embeddings * rate / (2 * math.pi)
    keep = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
    return rate * (keep + (1 - keep) / factor)


def rotations(config):
    """cos and sin of every position's angles for both halves of the channels, the first half's sin negative: fp32 [block_size, 1, D] each;
    (None, None) without rotary positions."""
    if config.position != "rope":
        return None, None
    rate = config.rope_theta ** (-torch.arange(0, config.head_dim, 2).float() / config.head_dim)
    angle = torch.outer(torch.arange(config.block_size).float(), scaled(rate, **config.rope_scaling or {}))[:, None, :]
    return torch.cat((angle.cos(), angle.cos()), -1), torch.cat((-angle.sin(), angle.sin()), -1)


def attend(q, k, v, backend, dropout=0.0, bias=None):
    """Attention of q [B, H, T, D] over k, v [B, K, S, D] -> [B, H, T, D]; causal, unless a bias [B, H, T, S] (sdpa: or [B, 1, T, S]) says
    what is seen.

    `sdpa` is PyTorch's fused kernel. `math` writes the two products out: on a CPU in bf16 that is several times faster at
    short lengths and still ahead at 1,024 (figures in NOTES.md).
    """
    (B, H, T, D), groups = q.shape, q.shape[1] // k.shape[1]
    if groups > 1 and (backend == "math" or bias is not None):       # the fused kernels that take a bias can't share heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    if backend == "sdpa":                    # on a GPU whatever kernel was asked for: flash takes no bias
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]) if bias is not None and q.is_cuda else nullcontext():
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=bias is None, dropout_p=dropout,
                                                  enable_gqa=q.shape[1] != k.shape[1])
    q, k, v = (z.reshape(B * H, -1, D) for z in (q, k, v))
    bias = torch.full((T, T), float("-inf"), dtype=q.dtype, device=q.device).triu(1) if bias is None else bias.flatten(0, 1)
    weights = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=D**-0.5).softmax(-1)
    return torch.bmm(F.dropout(weights, dropout), v).view(B, H, T, D)


class Attention(nn.Module):
    def __init__(self, config, backend):
        super().__init__()
        self.config, self.backend = config, backend
        H, K, D = config.n_head, config.n_kv_head, config.head_dim
        self.qkv = nn.Linear(config.n_embd, (H + 2 * K) * D, bias=config.qkv_bias)
        self.out = nn.Linear(H * D, config.n_embd, bias=config.o_bias)
        if config.qk_norm:
            self.q_norm = nn.Parameter(torch.ones(D))
            self.k_norm = nn.Parameter(torch.ones(D))

    def heads(self, x, cos, sin):
        """x [B, T, C] -> queries [B, T, H, D], keys and values [B, T, K, D], normed and turned. cos, sin: what
        GPT.turns gives."""
        c, (B, T, _) = self.config, x.shape
        H, K, D = c.n_head, c.n_kv_head, c.head_dim
        qk, v = self.qkv(x).view(B, T, H + 2 * K, D).split((H + K, K), dim=2)     # queries and keys share what follows
        if c.qk_norm:
            gain = torch.cat((self.q_norm.expand(H, D), self.k_norm.expand(K, D)))
            qk = rms_norm(qk, gain, c.norm_eps)
        if c.position == "rope":
            qk = rotate(qk, cos.to(qk.dtype), sin.to(qk.dtype))
        return *qk.split((H, K), dim=2), v

    def forward(self, x, cos, sin, cache=None):
        """cache(q, k, v): attention [B, T, H, D] over what it remembers too (engine.py, GPT.continued); None:
        within x alone."""
        q, k, v = self.heads(x, cos, sin)
        if cache is None:
            dropout = self.config.dropout if self.training else 0.0
            y = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), self.backend, dropout).transpose(1, 2)
        else:
            y = cache(q, k, v)
        return self.out(y.flatten(2))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.kind = config.mlp
        self.up = nn.Linear(config.n_embd, config.mlp_hidden, bias=config.mlp_bias)
        self.gate = nn.Linear(config.n_embd, config.mlp_hidden, bias=config.mlp_bias) if self.kind == "swiglu" else None
        self.down = nn.Linear(config.mlp_hidden, config.n_embd, bias=config.mlp_bias)

    def forward(self, x):
        if self.kind == "swiglu":
            return self.down(F.silu(self.gate(x)) * self.up(x))
        if self.kind in ("gelu", "gelu_tanh"):
            return self.down(F.gelu(self.up(x), approximate="tanh" if self.kind == "gelu_tanh" else "none"))
        return self.down(SquaredReLU.apply(self.up(x)))


class Block(nn.Module):
    def __init__(self, config, backend):
        super().__init__()
        self.dropout = config.dropout
        self.attention_norm, self.attention = make_norm(config), Attention(config, backend)
        self.mlp_norm, self.mlp = make_norm(config), MLP(config)

    def forward(self, x, cos, sin, cache=None):
        x = x + F.dropout(self.attention(self.attention_norm(x), cos, sin, cache), self.dropout, self.training)
        return x + F.dropout(self.mlp(self.mlp_norm(x)), self.dropout, self.training)


class Prompts(NamedTuple):
    """What the rows of a batch continue; see GPT.continued."""
    ids: torch.Tensor                        # [G, P]
    lengths: torch.Tensor                    # [G]; what stands past them is not seen. 0 is allowed
    of: torch.Tensor                         # [B], which of the G each row continues


class GPT(nn.Module):
    """`model(x)` gives the logits, `model.loss(x, y)` the summed cross entropy, `model.token_logprobs(x, y)` what GRPO learns from."""

    def __init__(self, config, attention="sdpa", gradient_checkpointing=False, loss_chunks=0):
        """attention: sdpa | math; gradient_checkpointing: recompute each block in the backward pass;
        loss_chunks: pieces in which the head and the loss are computed, 0: as many as LOGITS_AT_A_TIME asks for."""
        super().__init__()
        self.config, self.backend = config, attention
        self.gradient_checkpointing, self.loss_chunks = gradient_checkpointing, loss_chunks
        V, C = config.padded_vocab_size, config.n_embd
        self.token_embedding = nn.Embedding(V, C)
        self.position_embedding = nn.Embedding(config.block_size, C) if config.position == "learned" else None
        self.blocks = nn.ModuleList(Block(config, attention) for _ in range(config.n_layer))
        self.final_norm = make_norm(config)
        self.head = None if config.tied_head else nn.Linear(C, V, bias=False)
        for name, table in zip(("cos", "sin"), rotations(config)):
            self.register_buffer(name, table, persistent=False)
        self.initialise()

    @torch.no_grad()
    def initialise(self):
        """Loss at start within 0.05 of ln(vocab_size): what leaves a block, and an untied head, begins at zero; a tied
        head begins small enough that logits have a variance of 0.01 and the token just read does not stand out."""
        c = self.config
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for block in self.blocks:
            nn.init.zeros_(block.attention.out.weight)
            nn.init.zeros_(block.mlp.down.weight)
        std = min(0.1 * c.n_embd**-0.5, max(0.5, math.log(0.01 * c.vocab_size)) / c.n_embd) if c.tied_head else 1.0
        for table in self.tables():
            nn.init.normal_(table.weight, std=std)
        if self.head is not None:
            nn.init.zeros_(self.head.weight)

    @property
    def head_weight(self):
        """[V padded, C]"""
        return self.token_embedding.weight if self.head is None else self.head.weight

    def tables(self):
        return [t for t in (self.token_embedding, self.position_embedding) if t is not None]

    def n_params(self, embeddings=True):
        """Number of weights, padding rows included; without embeddings: look-up tables left out (a tied head is one)."""
        total = sum(p.numel() for p in self.parameters())
        return total if embeddings else total - sum(t.weight.numel() for t in self.tables())

    def flops_per_token(self, T):
        """Forward and backward, 6 N + 12 L H D T (PaLM, appendix B): N counts every weight used in a matrix product
        (the head once, tied or not; look-up tables not; a frozen one costs 4); attention without the causal halving."""
        c = self.config
        used = [m.weight for m in self.blocks.modules() if isinstance(m, nn.Linear)] + [self.head_weight]
        products = sum((6 if w.requires_grad else 4) * w.numel() for w in used)
        return products + 12 * c.n_layer * c.n_head * c.head_dim * T

    def hidden(self, x, position=None, caches=None):
        """Token ids [B, T] -> what the head reads [B, T, C], in autocast's bf16 or in fp32. position [T] or [B, T]: where the
        tokens stand, 0 ... T-1 if it is None. caches: see Attention, one a block."""
        position = slice(x.shape[1]) if position is None else position
        h = self.token_embedding(x)
        if self.position_embedding is not None:
            h = h + self.position_embedding.weight[position]
        if torch.is_autocast_enabled(x.device.type) and torch.get_autocast_dtype(x.device.type) == torch.bfloat16:
            h = h.bfloat16()         # the residual stream too: half the memory traffic; fp16's range would be too narrow
        h = F.dropout(h, self.config.dropout, self.training)
        cos, sin = self.turns(position, h)
        for block, cache in zip(self.blocks, caches or [None] * len(self.blocks)):
            if self.gradient_checkpointing and self.training:
                h = checkpoint(block, h, cos, sin, cache, use_reentrant=False)
            else:
                h = block(h, cos, sin, cache)
        return self.final_norm(h)

    def turns(self, position, h):
        """cos and sin at positions [T] or [B, T]: [T, 1, D], or [B, T, 1, D]. On a CPU once for each head that turns, [..., H + K, D] in h's
        format: a product with [T, 1, D] goes over memory D channels at a time (of 32 x 256 x 4 heads in bf16, both ways: 1.6 ms
        instead of 2.2, two Zen 5 cores)."""
        if self.cos is None:
            return None, None
        tables, c = (self.cos[position], self.sin[position]), self.config
        if h.device.type == "cpu":
            tables = (t.to(h.dtype).expand(*t.shape[:-2], c.n_head + c.n_kv_head, -1).contiguous() for t in tables)
        return tuple(tables)

    def continued(self, x, prompts):
        """`hidden` [B, T, C] of rows x [B, T] that continue Prompts, without attention's dropout. A prompt is computed once for all its
        rows: linear layers see G P + B T positions, and a row's attention is over its prompt's keys and values beside its own."""
        (ids, lengths, of), (B, T), c = prompts, x.shape, self.config
        (G, P), begin, places = ids.shape, lengths[of][:, None], torch.arange(ids.shape[1] + T, device=x.device)
        position = torch.cat((places[:P].repeat(G), (begin + places[:T]).flatten())).clamp(max=c.block_size - 1)     # of padding
        unseen = torch.where(places < P, places >= begin, False)[:, None] | (places > P + places[:T, None])
        autocast = torch.is_autocast_enabled(x.device.type)
        dtype = torch.get_autocast_dtype(x.device.type) if autocast else self.head_weight.dtype
        bias = torch.zeros(unseen.shape, dtype=dtype, device=x.device).masked_fill_(unseen, -math.inf)[:, None]
        if self.backend == "math":
            bias = bias.expand(-1, c.n_head, -1, -1).contiguous()      # once, not in every layer

        def attention(*qkv):                 # [1, G P + B T, heads, D]
            first, rest = zip(*(z[0].split((G * P, B * T)) for z in qkv))
            first, rest = ([z.view(*shape, *z.shape[1:]).transpose(1, 2) for z in zs] for shape, zs in (((G, P), first), ((B, T), rest)))
            k, v = (torch.cat((prompt.index_select(0, of), own), 2) for prompt, own in zip(first[1:], rest[1:]))
            parts = attend(*first, self.backend), attend(rest[0], k, v, self.backend, bias=bias)
            return torch.cat([y.transpose(1, 2).flatten(0, 1) for y in parts])[None]
        h = self.hidden(torch.cat((ids.flatten(), x.flatten()))[None], position[None], [attention] * c.n_layer)
        return h[0].split((G * P, B * T))[1].view(B, T, -1)

    def logits(self, h, project=None):
        """[..., C] -> fp32 logits [..., vocab_size]; padding ids are cut off. project: does the product with head_weight."""
        logits = (project(h) if project else F.linear(h, self.head_weight))[..., :self.config.vocab_size].float()
        cap = self.config.logit_softcap
        return cap * torch.tanh(logits / cap) if cap else logits

    def forward(self, x):
        """Token ids [B, T] -> fp32 logits [B, T, V]."""
        return self.logits(self.hidden(x))

    def loss(self, x, y):
        """The *sum* of the cross entropies of targets y [B, T] (IGNORE where not trained on) after x [B, T]: nats, fp32 [], to be
        divided by the number of targets in the whole optimizer step."""
        h = self.hidden(x).flatten(0, 1)
        chunks = self.loss_chunks or -(-len(h) // self.rows_at_a_time(h.device.type))
        weight = self.head_weight if torch.is_grad_enabled() else self.head_weight.detach()     # no gradient in evaluation
        return HeadAndLoss.apply(h, weight, y.flatten(), self.config.vocab_size, self.config.logit_softcap, -(-len(h) // chunks))

    def token_logprobs(self, x, y, temperature=1.0, prompts=None):
        """Log-probabilities of the targets y [B, T] after x [B, T], which begins a text or continues Prompts, at this temperature;
        and the entropies of the distributions they are drawn from, without a gradient: nats, fp32 [B, T] each, 0 where y is IGNORE.
        The head is computed for targets alone, a chunk of them at a time; if there are several chunks, again in the backward
        pass, so that B*T*V fp32 never exists."""
        h = self.hidden(x) if prompts is None else self.continued(x, prompts)
        targets = (y.flatten() != IGNORE).nonzero()[:, 0]
        h, y_, device = h.flatten(0, 1)[targets], y.flatten()[targets], h.device.type
        again = torch.is_grad_enabled() and len(h) * self.config.padded_vocab_size > LOGPROBS
        rows = self.rows_at_a_time(device, LOGPROBS_AT_A_TIME.get(device, 2**25) if again else LOGPROBS)

        def chunk(h, y):
            logprobs = F.log_softmax(self.logits(h).div_(temperature), dim=-1)
            with torch.no_grad():
                entropy = -logprobs.exp().mul_(logprobs).sum(-1)
            return logprobs.gather(1, y[:, None])[:, 0], entropy
        parts = [checkpoint(chunk, *part, use_reentrant=False) if again else chunk(*part) for part in zip(h.split(rows), y_.split(rows))]
        empty = torch.zeros(y.numel(), dtype=torch.float32, device=h.device)
        return tuple(empty.index_put((targets,), torch.cat(kind)).view_as(y) for kind in zip(*parts))

    def rows_at_a_time(self, device, logits=None):
        """Positions of so many logits, None: LOGITS_AT_A_TIME; at most 2**14, so that fp16 can sum a chunk's gradient."""
        return min(2**14, max(1, (logits or LOGITS_AT_A_TIME.get(device, 2**27)) // self.config.padded_vocab_size))

    @torch.no_grad()
    def generate(self, x, max_new_tokens, temperature=1.0, top_k=None, generator=None):
        """Continue x [B, T] by max_new_tokens; temperature 0 is greedy. The plain reference: it keeps no cache and
        computes every position anew for each token."""
        for _ in range(max_new_tokens):
            logits = self.logits(self.hidden(x[:, -self.config.block_size:])[:, -1])
            if temperature == 0:
                token = logits.argmax(-1, keepdim=True)
            else:
                logits = logits / temperature
                if top_k is not None:
                    least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
                    logits = logits.masked_fill(logits < least, float("-inf"))
                token = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            x = torch.cat((x, token), dim=1)
        return x


def blank(config, *args, device="cpu", dtype=torch.float32):
    """A GPT whose weights are still to come, from a file or another model: made in no time, where GPT() draws them."""
    with torch.device("meta"):
        model = GPT(config, *args)
    model.to(dtype).to_empty(device=device)
    model.cos, model.sin = (None if table is None else table.to(device) for table in rotations(config))
    return model


class HeadAndLoss(torch.autograd.Function):
    """Summed cross entropy of a linear head, `rows` positions at a time, so that B*T*V logits never exist at once.

    The gradient of a summed cross entropy is softmax - onehot, so it is taken while a chunk's logits are at hand: nothing
    is recomputed in the backward pass and only [B*T, C] and [V, C] are kept. At 32 x 1024 x 50304 the fp32 logits and
    their gradient would be 6,288 MiB each; chunks of 2**27 logits hold 512 MiB each.
    """

    @staticmethod
    def forward(ctx, h, weight, targets, vocab_size, softcap, rows):
        input_dtype, w = h.dtype, weight.to(h.dtype)
        if torch.is_autocast_enabled(h.device.type):
            low = torch.get_autocast_dtype(h.device.type)
            h, w = h.to(low), w.to(low)
        dh = torch.empty_like(h) if ctx.needs_input_grad[0] else None
        dw = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        loss = torch.zeros((), dtype=torch.float32, device=h.device)
        for start in range(0, len(h), rows):
            chunk, y = h[start:start + rows], targets[start:start + rows]
            logits = chunk @ w.t()
            if softcap:
                logits = softcap * torch.tanh(logits.float() / softcap)
            logits[:, vocab_size:] = float("-inf")
            p = torch.softmax(logits, dim=-1, dtype=torch.float32)
            # The likeliest id has p = 1 / sum(exp(logits - max)), so two maxima give the log of the sum.
            log_sum = logits.amax(-1).float() - p.amax(-1).log()
            trained = (y != IGNORE).float()
            index = y.clamp(min=0)[:, None]
            loss += ((log_sum - logits.gather(1, index)[:, 0].float()) * trained).sum()
            if dh is None and dw is None:
                continue
            p.scatter_add_(1, index, p.new_full((1, 1), -1.0).expand(len(y), 1))       # softmax - onehot
            if softcap:
                logits[:, vocab_size:] = 0
                p *= 1 - (logits / softcap).square()
            grad, trained = p.to(h.dtype), trained[:, None].to(h.dtype)     # untrained rows are masked where they are narrow
            if dh is not None:
                dh[start:start + rows] = (grad @ w) * trained
            if dw is not None:
                dw += grad.t() @ (chunk * trained)
        ctx.save_for_backward(dh, dw)
        ctx.dtypes = input_dtype, weight.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, scale):
        dh, dw = ctx.saved_tensors
        dh = None if dh is None else (dh.float() * scale).to(ctx.dtypes[0])
        dw = None if dw is None else (dw * scale).to(ctx.dtypes[1])
        return dh, dw, None, None, None, None


class LoRA(nn.Linear):
    """W x + alpha / rank * B A x, W frozen (Hu et al. 2021). `add_lora` turns an nn.Linear in place into one, so W keeps its
    name. qkv is one matrix: queries, keys and values share one A [rank, in], and each has its own rows of B [out, rank]."""

    @property
    def scale(self):
        return self.alpha / len(self.lora_a)

    def forward(self, x):
        y = F.linear(x, self.weight, self.bias)
        if not self.on:
            return y
        return y + self.scale * F.linear(F.linear(x, self.lora_a.to(x.dtype)), self.lora_b.to(x.dtype))


def add_lora(model, rank, alpha=None, linears=LINEARS):
    """Adapters beside these linears of every block; all other parameters are frozen, embeddings and head (tied or not) are not
    adapted. alpha None: 2 rank, as in TRL, torchtune and LLaMA-Factory. B is zero, so at first the function is unchanged.
    The adapters are fp32 whatever the rest is (cast a model before, not after). Returns the model; ValueError for rank < 1,
    unknown linears or a model that is adapted already."""
    chosen = [m for name, m in model.blocks.named_modules() if isinstance(m, nn.Linear) and name.split(".")[-1] in linears]
    if rank < 1:
        raise ValueError(f"Adapters of rank {rank} hold nothing: give a rank of 1 or more.")
    if rank > model.config.n_embd:
        raise ValueError(f"Adapters of rank {rank} hold more than the {model.config.n_embd} channels of the model: "
                         "lower the rank.")
    if not set(linears) <= set(LINEARS) or not chosen:
        raise ValueError(f"linears={linears} names what the blocks lack: choose from qkv, out, up, down and swiglu's gate.")
    if any(isinstance(m, LoRA) for m in model.modules()):
        raise ValueError("The model has adapters already: add new ones to a GPT that loads merged(model).")
    model.requires_grad_(False)
    for m in chosen:
        m.__class__, m.alpha, m.on = LoRA, 2 * rank if alpha is None else alpha, True
        fp32 = {"dtype": torch.float32, "device": m.weight.device}
        m.lora_a = nn.Parameter(nn.init.kaiming_uniform_(torch.empty(rank, m.in_features, **fp32), a=math.sqrt(5)))
        m.lora_b = nn.Parameter(torch.zeros(m.out_features, rank, **fp32))
    return model


@contextmanager
def adapters_off(model):
    """Within, the model is the one before add_lora, bit for bit: GRPO's reference. A backward pass belongs on the same side
    as its forward pass: gradient checkpointing computes the blocks anew."""
    layers = [m for m in model.modules() if isinstance(m, LoRA)]
    before = [m.on for m in layers]
    try:
        for m in layers:
            m.on = False
        yield
    finally:
        for m, on in zip(layers, before):
            m.on = on


def adapters(model):
    """{name: tensor} of the adapters alone."""
    return {name: value for name, value in model.state_dict().items() if name.endswith((".lora_a", ".lora_b"))}


def load_adapters(model, tensors):
    """Take over what `adapters` gave, into a model with adapters of the same shape; ValueError if they are not."""
    own = adapters(model)
    wrong = sorted(own.keys() ^ tensors.keys()) or [name for name in own if own[name].shape != tensors[name].shape]
    if wrong:
        raise ValueError(f"{wrong[0]} is missing, left over or of another shape: add_lora with the rank and the linears that the "
                         "adapters were made with.")
    model.load_state_dict(tensors, strict=False)


@torch.no_grad()
def merged(model):
    """{name: tensor} that a GPT without adapters loads as the function this one now computes (within adapters_off: the base's).
    Adapted weights are new and fp32, since a sum in bf16 would lose about 5% of what was learnt; the others are the model's."""
    own = adapters(model)
    weights = {name: value for name, value in model.state_dict().items() if name not in own}
    with torch.autocast(model.head_weight.device.type, enabled=False):             # which would multiply in bf16
        for name, m in model.named_modules():
            if isinstance(m, LoRA) and m.on:
                weights[f"{name}.weight"] = m.weight.float() + m.scale * m.lora_b.float() @ m.lora_a.float()
    return weights
