"""The GPT: one definition covers GPT-2, Llama, Qwen and a modern default. Imports only torch and layers/.

Shapes: B sequences, T positions, C = n_embd channels, V = vocab_size ids; in attention H query heads, K
key/value heads and D channels a head.

The from-scratch default follows small-model speed runs: RMSNorm, rotary positions (Su et al. 2021), QK-norm
(Henry et al. 2020), squared ReLU (So et al. 2021), zero-initialised output projections and an untied head.
"""
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from layers.ops import (ATTENTION, HeadAndLoss, IGNORE, Pad, RMSNorm, SquaredReLU, Unpad, chunk_loss,
                        drop_out, rms_norm)

CPU_LOGITS_PER_CHUNK = 2**25                 # 128 MiB in fp32
CPU_RECOMPUTED_LOGITS_PER_CHUNK = 2**23      # where GPT.divergence recomputes them in the backward pass


@dataclass
class GPTConfig:
    vocab_size: int = 50257                  # ids in use; the weights are padded to a multiple of 64
    block_size: int = 1024                   # maximum sequence length, tokens
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
    rope_scaling: dict | None = None         # {"rope_type": "linear" or "llama3", "factor": ...}: scale_rope
    qk_norm: bool = True                     # RMSNorm of each query and key head, before the rotation
    mlp: str = "relu2"                       # relu2 | gelu (exact, nanoGPT's) | gelu_tanh (GPT-2's) | swiglu
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    tied_head: bool = False                  # the head shares the token embedding's weights
    logit_softcap: float = 0.0               # logits = cap * tanh(logits / cap); 0: off
    dropout: float = 0.0
    mixer: str = "softmax"                   # softmax | favor | linear (layers/linear_attention.py)
    mixer_rule: str = "sum"                  # sum | delta: how favor and linear update their state
    mixer_features: int = 256                # favor: random features a head

    def __post_init__(self):
        """Fill in the fields that are None; raise ValueError for an invalid config."""
        check_config(self)
        self.n_kv_head = self.n_kv_head or self.n_head
        self.head_dim = self.head_dim or self.n_embd // self.n_head
        if self.mlp_hidden is None:
            self.mlp_hidden = 4 * self.n_embd
            if self.mlp == "swiglu":
                self.mlp_hidden = -(-8 * self.n_embd // (3 * 64)) * 64

    @property
    def padded_vocab_size(self):
        return -(-self.vocab_size // 64) * 64


# --- attention ---

def scale_rope(rate, rope_type=None, factor=1.0, low_freq_factor=1.0, high_freq_factor=4.0,
               original_max_position_embeddings=8192):
    """Scale rotary frequencies `rate` [D/2], in radians a position, to a context `factor` times longer.

    linear divides all of them by the factor (Chen et al. 2023). llama3 divides only those with few periods in
    the original context, with a ramp between (Llama 3.1).
    """
    if rope_type != "llama3":
        return rate / factor
    periods = original_max_position_embeddings * rate / (2 * math.pi)
    keep = ((periods - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
    return rate * (keep + (1 - keep) / factor)


def rope_tables(config):
    """Return cos and sin of all positions' angles, fp32 [block_size, 1, D]; None for learned positions.

    Both halves of the channels have the same angles. The sin of the first half is negated for `rotate`.
    """
    if config.position != "rope":
        return None, None
    # On the CPU, so that they have values in a model on the meta device too.
    pairs = torch.arange(0, config.head_dim, 2, device="cpu")
    rate = config.rope_theta ** (-pairs.float() / config.head_dim)
    rate = scale_rope(rate, **(config.rope_scaling or {}))
    angle = torch.outer(torch.arange(config.block_size, device="cpu").float(), rate)[:, None, :]
    cos = torch.cat((angle.cos(), angle.cos()), -1)
    sin = torch.cat((-angle.sin(), angle.sin()), -1)
    return cos, sin


def rotate(x, cos, sin):
    """Rotate x [B, T, heads, D], in Llama's layout of two halves, by cos and sin from GPT.rotary_embedding.

    This takes three kernels; writing out the two halves takes seven.
    """
    a, b = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat((b, a), dim=-1), sin)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        H = config.n_head
        K = config.n_kv_head
        D = config.head_dim
        self.qkv = nn.Linear(config.n_embd, (H + 2 * K) * D, bias=config.qkv_bias)
        self.out = nn.Linear(H * D, config.n_embd, bias=config.o_bias)
        gain = 1.0
        self.mixer = None
        if config.mixer != "softmax":
            from layers.linear_attention import Mixer, initial_qk_gain
            gain = initial_qk_gain(config)
            self.mixer = Mixer(config)
        if config.qk_norm:
            self.q_norm = nn.Parameter(torch.full((D,), gain))
            self.k_norm = nn.Parameter(torch.full((D,), gain))

    def project_qkv(self, x, cos, sin):
        """Return queries [B, T, H, D] and keys and values [B, T, K, D] of x [B, T, C], normed and rotated."""
        B, T, _ = x.shape
        H = self.config.n_head
        K = self.config.n_kv_head
        D = self.config.head_dim
        qkv = self.qkv(x).view(B, T, H + 2 * K, D)
        qk, v = qkv.split((H + K, K), dim=2)
        if self.config.qk_norm:
            gain = torch.cat((self.q_norm.expand(H, D), self.k_norm.expand(K, D)))
            qk = rms_norm(qk, gain, self.config.norm_eps)
        if self.config.position == "rope":
            qk = rotate(qk, cos.to(qk.dtype), sin.to(qk.dtype))
        q, k = qk.split((H, K), dim=2)
        return q, k, v

    def forward(self, x, cos, sin, attend):
        """Return [B, T, C] for x [B, T, C]; see GPT.hidden for attend."""
        inputs = self.project_qkv(x, cos, sin)
        if self.mixer is not None:
            inputs = self.mixer(x, *inputs, gain=self.k_norm if self.config.qk_norm else None)
        return self.out(attend(*inputs).flatten(2))


# --- the block ---

class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.kind = config.mlp
        self.up = nn.Linear(config.n_embd, config.mlp_hidden, bias=config.mlp_bias)
        self.gate = None
        if self.kind == "swiglu":
            self.gate = nn.Linear(config.n_embd, config.mlp_hidden, bias=config.mlp_bias)
        self.down = nn.Linear(config.mlp_hidden, config.n_embd, bias=config.mlp_bias)

    def activation(self, x):
        """Return the activations [..., mlp_hidden] of x [..., C]."""
        if self.kind == "swiglu":
            return F.silu(self.gate(x)) * self.up(x)
        if self.kind == "gelu":
            return F.gelu(self.up(x))
        if self.kind == "gelu_tanh":
            return F.gelu(self.up(x), approximate="tanh")
        return SquaredReLU.apply(self.up(x))

    def forward(self, x):
        return self.down(self.activation(x))


def make_norm(config):
    kind = RMSNorm if config.norm == "rmsnorm" else nn.LayerNorm
    return kind(config.n_embd, eps=config.norm_eps)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.dropout = config.dropout
        self.attention_norm = make_norm(config)
        self.attention = Attention(config)
        self.mlp_norm = make_norm(config)
        self.mlp = MLP(config)

    def forward(self, x, cos, sin, attend):
        y = self.attention(self.attention_norm(x), cos, sin, attend)
        x = x + drop_out(y, self.dropout, self.training)
        y = self.mlp(self.mlp_norm(x))
        return x + drop_out(y, self.dropout, self.training)


# --- the parts of a training step that can be compiled ---

def call_block(block, h, cos, sin, attend):
    """Return block(h) [B, T, C] of h [B, T, C]; see GPT.hidden."""
    return block(h, cos, sin, attend)


def chunk_divergence(model, teacher, h, teacher_h, y, temperature):
    """Return the sums over N positions of the KL divergence of a teacher's distributions from the model's and
    of the cross entropy of y [N], after h [N, C] and the teacher's teacher_h [N, C']."""
    ours = F.log_softmax(model.logits(h) / temperature, dim=-1)
    with torch.no_grad():
        # Qwen2.5-7B has 128 unused ids more than Qwen2.5-0.5B.
        theirs = F.log_softmax(teacher.logits(teacher_h)[:, :ours.shape[1]] / temperature, dim=-1)
    return F.kl_div(ours, theirs, reduction="sum", log_target=True), F.nll_loss(ours, y, reduction="sum")


class CompiledParts(NamedTuple):
    """The functions that --compile replaces: the block, the loss of a chunk, and `compile`, which is applied
    to the functions of layers/logprobs.py."""
    block: Callable = call_block
    loss: Callable = chunk_loss
    compile: Callable = lambda function: function

    @classmethod
    def compiled(cls, mode=None, dynamic=None, blocks=True):
        """Return the functions compiled with torch.compile's mode; dynamic applies to blocks.

        All blocks share one compiled function. Each has its gradients when its own backward pass ends, so
        that they can be reduced across ranks during the rest. blocks: whether to compile them.
        """
        block = torch.compile(call_block, mode=mode, dynamic=dynamic) if blocks else call_block
        # Not dynamic=True: the kernel needs the constant number of ids to know how rows are aligned.
        loss = torch.compile(chunk_loss, mode=mode, dynamic=None)
        return cls(block, loss, cache(partial(torch.compile, mode=mode, dynamic=True)))


def logits_per_chunk(device):
    """Return the number of logits per chunk; up to four fp32 tensors of that size exist at once (with a
    teacher, five).

    On a GPU each takes 1/64 of total memory. Free memory varies between runs, which would vary rounding.
    """
    if device.type != "cuda":
        return CPU_LOGITS_PER_CHUNK
    memory = 2**35                           # for estimates on a machine without a GPU
    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(device).total_memory
    return memory // (64 * 4)


# --- the model ---

class GPT(nn.Module):
    """model(x) returns logits and model.loss(x, y) the summed cross entropy. GRPO trains on
    model.token_logprobs(x, y)."""

    def __init__(self, config, attention="sdpa", gradient_checkpointing=False, loss_chunks=0):
        """Build the model with freshly initialised weights.

        attention: a name in ops.ATTENTION.
        gradient_checkpointing: recompute each block in the backward pass.
        loss_chunks: number of chunks for head and loss; 0: derived from logits_per_chunk.
        """
        super().__init__()
        self.parts = CompiledParts()
        self.config = config
        self.backend = attention
        self.gradient_checkpointing = gradient_checkpointing
        self.loss_chunks = loss_chunks
        self.feedback = None                 # feedback alignment: experimental/feedback.py
        # Parts that one script trains, such as a value head. Its checkpoints hold them; other commands leave
        # them aside.
        self.extras = nn.ModuleDict()
        V = config.padded_vocab_size
        C = config.n_embd
        self.token_embedding = nn.Embedding(V, C)
        self.position_embedding = None
        if config.position == "learned":
            self.position_embedding = nn.Embedding(config.block_size, C)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.final_norm = make_norm(config)
        self.head = None if config.tied_head else nn.Linear(C, V, bias=False)
        cos, sin = rope_tables(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.init_weights()

    def fill_rope_tables(self, dtype=torch.float32):
        """Recompute cos and sin of a model that was built on the meta device."""
        device = self.token_embedding.weight.device
        if self.cos is not None:
            self.cos, self.sin = (table.to(device, dtype) for table in rope_tables(self.config))

    @torch.no_grad()
    def init_weights(self):
        """Initialise the weights so that the first loss is within 0.05 of ln(vocab_size).

        Output projections of the blocks and an untied head are zero. A tied head is small: its logits have a
        variance of 0.01, and the newest token does not stand out.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for block in self.blocks:
            nn.init.zeros_(block.attention.out.weight)
            nn.init.zeros_(block.mlp.down.weight)
        std = 1.0
        if self.config.tied_head:
            C = self.config.n_embd
            std = min(0.1 * C**-0.5, max(0.5, math.log(0.01 * self.config.vocab_size)) / C)
        for embedding in self.embeddings():
            nn.init.normal_(embedding.weight, std=std)
        if self.head is not None:
            nn.init.zeros_(self.head.weight)
        for module in self.modules():
            if hasattr(module, "draw_vectors"):
                module.draw_vectors()

    def hidden(self, x, positions=None, attentions=None):
        """Return final hidden states [B, T, C] of ids x [B, T], in bf16 under bf16 autocast, else in fp32.

        positions: [T] or [B, T] of the tokens; None: 0 ... T-1.
        attentions: for each block a function of queries [B, T, H, D], keys and values [B, T, K, D] that
        returns [B, T, H, D] and reads a cache (engine/) or prompts (PromptAttention); None: causal_attention.
        With mixer=favor or linear its arguments are those that Mixer returns.
        """
        if positions is None:
            positions = slice(x.shape[1])
        if attentions is None:
            attentions = [self.causal_attention] * len(self.blocks)
        h = self.token_embedding(x)
        if self.position_embedding is not None:
            h = h + self.position_embedding.weight[positions]
        device = x.device.type
        if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.bfloat16:
            # A bf16 residual stream halves the memory traffic; fp16's range would be too narrow.
            h = h.bfloat16()
        h = drop_out(h, self.config.dropout, self.training)
        cos, sin = self.rotary_embedding(positions, h)
        drive = self.feedback.start(self) if self.feedback else None
        for block, attend in zip(self.blocks, attentions):
            if self.gradient_checkpointing and self.training:
                h = checkpoint(self.parts.block, block, h, cos, sin, attend, use_reentrant=False)
            else:
                h = self.parts.block(block, h, cos, sin, attend)
            if drive:
                h = drive(h)
        return self.final_norm(h)

    def causal_attention(self, q, k, v, write=None):
        """Return causal attention [B, T, H, D] by the chosen kernel or mixer, with dropout in training."""
        if self.config.mixer != "softmax":
            from layers.linear_attention import mix
            return mix(q, k, v, write)[0]
        dropout = self.config.dropout if self.training else 0.0
        return ATTENTION[self.backend](q, k, v, dropout=dropout)

    def rotary_embedding(self, positions, h):
        """Return cos and sin [..., 1, D] at positions [T] or [B, T]; None for learned positions.

        On a CPU they are expanded to [..., H + K, D] in h's dtype: a product with [T, 1, D] would read memory
        D channels at a time (forward and backward, 32 x 256 x 4 heads in bf16: 1.6 instead of 2.2 ms on two
        Zen 5 cores).
        """
        if self.cos is None:
            return None, None
        cos = self.cos[positions]
        sin = self.sin[positions]
        if h.device.type == "cpu":
            shape = *cos.shape[:-2], self.config.n_head + self.config.n_kv_head, -1
            cos = cos.to(h.dtype).expand(shape).contiguous()
            sin = sin.to(h.dtype).expand(shape).contiguous()
        return cos, sin

    @property
    def head_weight(self):
        """The head's weight [V padded, C]."""
        return self.token_embedding.weight if self.head is None else self.head.weight

    def logits(self, h, project=None):
        """Return fp32 logits [..., V] of h [..., C], without those of padding ids. project replaces the
        product with head_weight."""
        logits = project(h) if project else F.linear(h, self.head_weight)
        logits = logits[..., :self.config.vocab_size].float()
        cap = self.config.logit_softcap
        return cap * torch.tanh(logits / cap) if cap else logits

    def forward(self, x):
        """Return fp32 logits [B, T, V] of token ids x [B, T]."""
        return self.logits(self.hidden(x))

    def loss(self, x, y, target_index=None, prefix=None):
        """Return the *sum* of the cross entropies of targets y [B, T] after x [B, T]: nats, fp32 [].

        Targets that are IGNORE don't count. Divide by the number of targets in the optimizer step.
        target_index: [N] of the other targets in y.flatten(), for which alone the head is computed then (a
        fifth of SmolLM2-135M's products); None: the head is computed for all positions.
        prefix: [P] ids that all rows of x continue, computed once, without attention dropout.
        """
        h = self.hidden(x) if prefix is None else self.hidden_after_prompts(x, Prompts.shared(prefix, len(x)))
        h = h.flatten(0, 1)
        y = y.flatten()
        if target_index is not None:
            h = h.index_select(0, target_index)
            y = y.index_select(0, target_index)
        chunks = self.loss_chunks or -(-len(h) // self.rows_per_chunk(h.device))
        rows = -(-len(h) // chunks) if len(h) else 1         # no target: an empty micro-batch
        weight = self.head_weight
        if not torch.is_grad_enabled():
            weight = weight.detach()         # otherwise evaluation would compute its gradient
        c = self.config
        return HeadAndLoss.apply(h, weight, y, c.vocab_size, c.logit_softcap, rows, self.parts.loss)

    def token_logprobs(self, x, y, temperature=1.0, prompts=None, target_index=None):
        """Return logprobs of targets y [B, T] after x [B, T], and entropies of their distributions.

        Both are in nats at this temperature, fp32 [B, T], 0 where y is IGNORE, with gradient. Each row of x
        starts a text or continues one of the Prompts. The head is computed only for targets, in chunks, and
        several chunks again in the backward pass. So B*T*V fp32 logits never exist.
        target_index: [N] of the targets in y.flatten(); None: computed here, which synchronizes.
        """
        from layers.logprobs import HeadAndLogprobs, chunk_gradient, chunk_logprobs
        if target_index is None:
            target_index = (y.flatten() != IGNORE).nonzero()[:, 0]
        h = self.hidden_at(x, prompts, target_index)
        targets = y.flatten().index_select(0, target_index)
        c = self.config
        rows = self.rows_per_chunk(h.device)
        functions = [self.parts.compile(of) for of in (chunk_logprobs, chunk_gradient)]
        columns = HeadAndLogprobs.apply(
            h, self.head_weight, targets, c.vocab_size, c.logit_softcap, temperature, rows, functions)
        at = target_index // y.shape[1], target_index % y.shape[1]
        zeros = torch.zeros(y.shape, dtype=torch.float32, device=h.device)
        return tuple(zeros.index_put(at, column) for column in columns)

    def divergence(self, teacher, x, y, temperature, prompts, target_index):
        """Return the KL divergence of a teacher's (a GPT's) distributions from the model's, over all ids, and
        the cross entropy of the targets, both summed over the targets of token_logprobs: nats at this
        temperature, fp32 []. The teacher has no gradient."""
        h = self.hidden_at(x, prompts, target_index)
        with torch.no_grad():
            teacher_h = teacher.hidden_at(x, prompts, target_index)
        targets = y.flatten().index_select(0, target_index)
        per_chunk = CPU_RECOMPUTED_LOGITS_PER_CHUNK if h.device.type == "cpu" else None
        rows = self.rows_per_chunk(h.device, per_chunk)
        sums = torch.zeros(2, device=h.device)
        for chunk in zip(h.split(rows), teacher_h.split(rows), targets.split(rows)):
            inputs = self, teacher, *chunk, temperature
            sums = sums + torch.stack(checkpoint(chunk_divergence, *inputs, use_reentrant=False))
        return sums.unbind()

    def hidden_at(self, x, prompts, target_index):
        """Return the hidden states [N, C] at positions target_index [N] of x.flatten(), x [B, T]."""
        h = self.hidden(x) if prompts is None else self.hidden_after_prompts(x, prompts)
        return h.flatten(0, 1).index_select(0, target_index)

    def rows_per_chunk(self, device, logits=None):
        """Return the number of rows in a chunk of `logits` logits; None: logits_per_chunk.

        At most 2**14, so that fp16 can sum a chunk's gradient.
        """
        logits = logits or logits_per_chunk(device)
        return min(2**14, max(1, logits // self.config.padded_vocab_size))

    def hidden_after_prompts(self, x, prompts):
        """Return hidden states [B, T, C] of rows x [B, T] that continue Prompts, without attention dropout.

        Each prompt is computed once for all of its rows: linear layers see one sequence of G P + B T
        positions (of these only prompts.kept), and a row attends to its prompt's keys and values as well as
        its own.
        """
        B, T = x.shape
        G, P = prompts.ids.shape
        index = torch.arange(P + T, device=x.device)
        row_positions = prompts.lengths[prompts.prompt_index][:, None] + index[:T]
        positions = torch.cat((index[:P].repeat(G), row_positions.flatten()))
        # Padding may lie past the last position.
        positions = positions.clamp(max=self.config.block_size - 1)
        if self.config.mixer == "softmax":
            attention = self.prompt_attention(prompts, T)
        else:
            from layers.linear_attention import PromptMixing
            attention = PromptMixing(prompts)
        ids = torch.cat((prompts.ids.flatten(), x.flatten()))
        n = len(ids)
        kept = prompts.kept
        if kept is not None:
            ids = ids[kept]
            positions = positions[kept]
            attention = PaddedAttention(attention, kept, n)
        h = self.hidden(ids[None], positions[None], [attention] * len(self.blocks))[0]
        if kept is not None:
            h = Pad.apply(h, kept, n)
        _, rows = h.split((G * P, B * T))
        return rows.view(B, T, -1)

    def prompt_attention(self, prompts, T):
        """Return the PromptAttention for rows of T positions."""
        device = prompts.ids.device.type
        autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else self.head_weight.dtype
        return PromptAttention(prompts, prompts.mask(T, dtype), ATTENTION[self.backend])

    @torch.no_grad()
    def generate(self, x, max_new_tokens, temperature=1.0, top_k=None, generator=None):
        """Continue x [B, T] by max_new_tokens; temperature 0 is greedy.

        This is the reference implementation, without a cache: each token recomputes every position.
        """
        for _ in range(max_new_tokens):
            logits = self.logits(self.hidden(x[:, -self.config.block_size:])[:, -1])
            if temperature == 0:
                token = logits.argmax(-1, keepdim=True)
            else:
                logits = logits / temperature
                if top_k is not None:
                    kth_largest = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
                    logits = logits.masked_fill(logits < kth_largest, float("-inf"))
                token = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            x = torch.cat((x, token), dim=1)
        return x

    def embeddings(self):
        if self.position_embedding is None:
            return [self.token_embedding]
        return [self.token_embedding, self.position_embedding]

    def n_params(self, embeddings=True):
        """Return the number of weights with padding rows; lookup tables only if `embeddings`."""
        total = sum(p.numel() for p in self.parameters())
        if not embeddings:
            total -= sum(e.weight.numel() for e in self.embeddings())
        return total

    def head_flops(self):
        """Return FLOPs of the head per token for which it is computed."""
        return product_flops(self.head_weight)

    def flops_per_token(self, T):
        """Return FLOPs of forward and backward pass per token: 6 N + 12 L H D T (PaLM, appendix B).

        N counts the weights of every matrix product: the head once, no lookup tables; a frozen weight costs 4
        instead of 6. Attention is not halved for causality, and other mixers don't depend on T. Feedback adds
        its matrices.
        """
        weights = [module.weight for module in self.blocks.modules() if isinstance(module, nn.Linear)]
        products = self.head_flops() + sum(map(product_flops, weights))
        if self.feedback:
            products += self.feedback.flops_per_token()
        c = self.config
        if c.mixer != "softmax":
            from layers.linear_attention import flops_per_token
            return products + c.n_layer * flops_per_token(c)
        return products + 12 * c.n_layer * c.n_head * c.head_dim * T


def product_flops(weight):
    """Return FLOPs per token of a weight's products, forward and backward."""
    return (6 if weight.requires_grad else 4) * weight.numel()


class SkipInit(TorchFunctionMode):
    """Skip torch.nn.init: on the meta device it imports torch._dynamo to draw no values, half of the time
    until sample.py's first token."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(function, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return function(*args, **kwargs)


def on_meta(config, *args):
    """Return a GPT on the meta device, without memory for weights. ValueError for one with buffers that
    checkpoints lack: its copies would have other values there."""
    with torch.device("meta"), SkipInit():
        model = GPT(config, *args)
    for name, _ in model.named_buffers():
        if name not in ("cos", "sin", *model.state_dict()):
            raise ValueError(f"The buffer {name} of GPT is not saved with its weights: register it without "
                             "persistent=False.")
    return model


def blank(config, *args, device="cpu", dtype=torch.float32):
    """Return a GPT with uninitialised weights, to be filled from a file or another model."""
    model = on_meta(config, *args)
    model.to(dtype).to_empty(device=device)
    model.fill_rope_tables()
    return model


# --- rows that continue prompts ---

class Prompts(NamedTuple):
    """The prompts that the rows of a batch continue; see GPT.hidden_after_prompts."""
    ids: torch.Tensor                        # [G, P]
    lengths: torch.Tensor                    # [G]; ids past them are padding. 0 is allowed
    prompt_index: torch.Tensor               # [B], the prompt (0 ... G - 1) of each row
    kept: torch.Tensor | None = None         # [N], the positions to compute among the G P + B T of prompts
                                             # and rows: at least all that are not padding. None: all

    @classmethod
    def shared(cls, ids, n_rows):
        """Return the Prompts of rows that all continue the same ids [P]."""
        return cls(ids[None], ids.new_full((1,), len(ids)), ids.new_zeros(n_rows))

    def mask(self, T, dtype):
        """Return the mask [B, 1, T, P + T] of rows of T positions over their prompts and themselves.

        -inf masks a prompt's padding and a row's later positions; other entries are 0.
        """
        P = self.ids.shape[1]
        index = torch.arange(P + T, device=self.ids.device)
        lengths = self.lengths[self.prompt_index][:, None]
        padding = (index < P) & (index >= lengths)                   # [B, P + T]
        future = index > P + index[:T, None]                         # [T, P + T]
        masked = padding[:, None] | future                           # [B, T, P + T]
        mask = torch.zeros(masked.shape, dtype=dtype, device=masked.device)
        return mask.masked_fill_(masked, -math.inf)[:, None]


class PromptAttention:
    """Attention over one sequence of G prompts followed by the B rows that continue them.

    mask [B, 1, T, P + T]: from Prompts.mask. attend: a function in ops.ATTENTION.
    """

    def __init__(self, prompts, mask, attend):
        self.prompts = prompts
        self.mask = mask
        self.attend = attend

    def __call__(self, q, k, v):
        """Return [1, G P + B T, H, D] for q of that shape, keys and values [1, G P + B T, K, D]."""
        prompt_q, row_q = self.split(q)
        prompt_k, row_k = self.split(k)
        prompt_v, row_v = self.split(v)
        prompt_y = self.attend(prompt_q, prompt_k, prompt_v)
        k = self.with_prompts(prompt_k, row_k)
        v = self.with_prompts(prompt_v, row_v)
        row_y = self.attend(row_q, k, v, mask=self.mask)
        return torch.cat((prompt_y.flatten(0, 1), row_y.flatten(0, 1)))[None]

    def split(self, z):
        """Split z [1, G P + B T, heads, D] into prompts [G, P, heads, D] and rows [B, T, heads, D]."""
        G, P = self.prompts.ids.shape
        B, _, T, _ = self.mask.shape
        prompts, rows = z[0].split((G * P, B * T))
        return prompts.unflatten(0, (G, P)), rows.unflatten(0, (B, T))

    def with_prompts(self, prompts, rows):
        """Prepend each row's prompt to its keys or values [B, T, K, D]: [B, P + T, K, D].

        The memory layout is [B, K, P + T, D], which kernels read without a copy.
        """
        prompts = prompts.transpose(1, 2)
        if len(prompts) == 1:                # its backward pass is one sum, in bf16 more exact
            prompts = prompts.expand(len(rows), -1, -1, -1)
        else:
            prompts = prompts.index_select(0, self.prompts.prompt_index)
        return torch.cat((prompts, rows.transpose(1, 2)), dim=2).transpose(1, 2)


class PaddedAttention:
    """PromptAttention or PromptMixing within hidden states without padding.

    Of the 7,836 positions of 96 completions of SmolLM2-135M, 2,521 were padding; an update without them took
    55 instead of 82 s (two Zen 3 cores).
    """

    def __init__(self, attend, kept, n):
        self.attend = attend
        self.kept = kept                     # [N] of the n positions with padding
        self.n = n

    def __call__(self, *inputs):
        """Return [1, N, H, D] from inputs [1, N, ...]."""
        padded = [Pad.apply(z[0], self.kept, self.n)[None] for z in inputs]
        return Unpad.apply(self.attend(*padded)[0], self.kept)[None]


# --- validation of GPTConfig ---

def is_not_negative(value):
    return type(value) in (int, float) and 0 <= value < math.inf


def is_positive(value):
    return is_not_negative(value) and value > 0


# {rule: (fields, predicate)}
RULES = {
    "a whole number from 1 to 2**31 - 1": (
        "vocab_size block_size n_head n_embd n_kv_head head_dim mlp_hidden",
        lambda value: type(value) is int and 0 < value < 2**31),
    "a whole number from 1 to 1,000": ("n_layer", lambda value: type(value) is int and 0 < value <= 1000),
    "a whole number from 1 to 65,536": (
        "mixer_features", lambda value: type(value) is int and 0 < value <= 2**16),
    "a number above 0": ("norm_eps rope_theta", is_positive),
    "a number of at least 0": ("logit_softcap dropout", is_not_negative),
    "true or false": ("qk_norm qkv_bias o_bias mlp_bias tied_head", lambda value: type(value) is bool),
    "rmsnorm or layernorm": ("norm", ("rmsnorm", "layernorm").__contains__),
    "rope or learned": ("position", ("rope", "learned").__contains__),
    "relu2, gelu, gelu_tanh or swiglu": ("mlp", ("relu2", "gelu", "gelu_tanh", "swiglu").__contains__),
    "softmax, favor or linear": ("mixer", ("softmax", "favor", "linear").__contains__),
    "sum or delta": ("mixer_rule", ("sum", "delta").__contains__),
    "an object": ("rope_scaling", lambda value: type(value) is dict),
}


def check_config(config):
    """Raise ValueError for an invalid GPTConfig. A field may be None where that is its default."""
    for rule, (names, is_valid) in RULES.items():
        for name in names.split():
            value = getattr(config, name)
            if value is None and getattr(GPTConfig, name) is None:
                continue
            if not is_valid(value):
                raise ValueError(f"{name}={str(value)[:80]} should be {rule}")
    _, *known = inspect.signature(scale_rope).parameters
    for key, value in (config.rope_scaling or {}).items():
        if key == "rope_type":
            valid = value in ("linear", "llama3")
        else:
            valid = key in known and is_positive(value)
        if not valid:
            raise ValueError(f"rope_scaling has {key[:80]}={str(value)[:80]}, which is not supported")
    if config.mixer == "softmax" and config.mixer_rule != "sum":
        raise ValueError(f"mixer_rule={config.mixer_rule} needs mixer=favor or linear, not softmax")
    if not config.head_dim and config.n_embd % config.n_head:
        raise ValueError(f"n_embd={config.n_embd} is not divisible by n_head={config.n_head}")
    n_kv_head = config.n_kv_head or config.n_head
    if config.n_head % n_kv_head:
        raise ValueError(f"n_head={config.n_head} is not divisible by n_kv_head={n_kv_head}")
    head_dim = config.head_dim or config.n_embd // config.n_head
    if config.position == "rope" and head_dim % 2:
        raise ValueError(f"head_dim={head_dim} is odd, but rotary positions rotate channels in pairs")
