"""The device's side of the engine: the model, its cache and CUDA graphs. It knows slots, and no samples.

Shapes: B rows of a step (slots 0 ... B-1), T tokens of a prompt or reply, P tokens of a common prefix.
"""
import os
from contextlib import nullcontext
from dataclasses import KW_ONLY, InitVar, dataclass
from functools import partial
from importlib.util import find_spec

import numpy as np
import torch
from torch.nn.attention import sdpa_kernel

from engine.gpu import CUDAGraph
from engine.kv_cache import PREFILL_TOKENS, KVCache, slots_that_fit
from engine.sampler import draw, uniform
from layers.lora import fingerprint, merged_weights
from layers.ops import SDPA_WITH_MASK
from layers.packed import Packed, pack_linears, takes_half_weights
from model import GPT, on_meta
from runtime import hardware, memory

MIN_PREFIX = 16                              # shortest common prefix of prompts that is computed once
DEVICE_TYPE_OVERRIDE = None                  # "cuda": take a GPU's branches on a CPU, for tests


def graph_size(n):
    """Return the rows of a CUDA graph for n rows: a power of two up to 16, then a multiple of 16."""
    return 1 << (n - 1).bit_length() if n <= 16 else -(-n // 16) * 16


@dataclass(eq=False, repr=False)
class ModelRunner:
    """Runs a copy of a model on the tokens in slots. Deterministic: every matrix product has the same shape
    whatever else is in the batch, so that a sample is bitwise the same in any batch (at the same `slots` and
    `context`; on an Intel CPU, after hardware.ignore_alignment()). Otherwise only its noise is the same:
    logprobs agree to 1e-5 in fp32 without TF32, and in bf16 a different token is drawn occasionally.
    """
    model: InitVar[GPT]                      # copied; self.model is the runner's own
    slots: int | None = None                 # rows in flight; None: as many as fit into memory, at most
                                             # MAX_SLOTS and `samples`
    context: int | None = None               # longest prompt plus completion, in tokens; None: block_size
    _: KW_ONLY
    samples: int | None = None               # most samples of a call of generate(); None: not known
    dtype: torch.dtype | None = None         # of weights and cache; None: the model's
    device: torch.device | None = None       # None: the model's
    deterministic: bool = False
    poll: int | None = None                  # steps between two reads of results; None: 8 on a GPU, else 1
    cuda_graphs: bool = True                 # on a GPU
    fused: bool = True                       # decode by engine/fused_step.py where it runs
    half_weights: bool = False               # on an x86 CPU in fp32: keep a large model's matrices in fp16

    @torch.inference_mode(False)
    def __post_init__(self, model):
        self.config = model.config
        self.device = self.device or model.head_weight.device
        self.device_type = DEVICE_TYPE_OVERRIDE or self.device.type
        self.dtype = self.dtype or model.head_weight.dtype
        block_size = self.config.block_size
        self.context = block_size if self.context is None else min(self.context, block_size)
        if self.poll is None:
            self.poll = 8 if self.device_type == "cuda" else 1
        if self.poll < 1 or self.context < 2 or self.slots is not None and self.slots < 1:
            raise ValueError(f"slots={self.slots} and poll={self.poll} must be at least 1, "
                             f"and context={self.context} at least 2.")
        self.cuda_graphs = self.cuda_graphs and self.device_type == "cuda"
        self.fused = self.fused and self.can_fuse()
        self.half_weights &= takes_half_weights(model.n_params(), self.device_type, self.dtype)
        self.build_model()
        self.load(model)
        if self.slots is None:
            fit = slots_that_fit(self.config, self.context, self.dtype, self.device)
            self.slots = min(fit, self.samples or fit)
        self.allocate(self.slots)

    def can_fuse(self):
        """Return whether engine/fused_step.py runs: not in fp32, whose products tensor cores round."""
        if (self.device_type != "cuda" or self.dtype == torch.float32 or self.config.mixer != "softmax"
                or self.deterministic or not find_spec("triton")):
            return False
        from engine import fused_step
        return fused_step.works(self.config, self.device, self.dtype)

    @property
    def format(self):
        """Return the number formats for the log."""
        (name,) = [name for name, dtype in hardware.DTYPES.items() if dtype == self.dtype]
        return f"{name} with fp16 weights" if self.half_weights else name

    def build_model(self):
        """Build the runner's own model; load() fills in its weights."""
        attention = "sdpa"
        if self.device_type == "cpu" and self.dtype == torch.bfloat16 and self.context <= 1024:
            attention = "math"
        if self.device.type == "cuda":
            capability = torch.cuda.get_device_capability(self.device)
            attention = "sdpa" if hardware.shares_heads(capability, self.dtype) else "sdpa_repeated"
        self.model = on_meta(self.config, attention)
        self.head = pack_linears(self.model, self.device_type, self.dtype, self.half_weights)
        self.model.to(self.dtype).to_empty(device=self.device).requires_grad_(False).eval()
        self.model.fill_rope_tables(self.dtype)
        if self.fused:
            from engine import fused_step
            fused_step.merge_gates(self.model)

    @torch.no_grad()
    def load(self, model):
        """Copy the weights of a model of the same shape, with adapters merged in fp32. CUDA graphs stay."""
        model = getattr(model, "_orig_mod", model)            # unwrap a compiled model
        setters = {name: tensor.copy_ for name, tensor in self.model.state_dict().items()}
        for name, module in self.model.named_modules():
            if isinstance(module, Packed):
                setters[f"{name}.weight"] = module.pack
        head = "head.weight" if model.head else "token_embedding.weight"
        self.weight_bytes = 0                # read in each step
        for name, weight in merged_weights(model, self.dtype):
            weight = weight.to(self.dtype)
            if name.startswith("blocks.") or name == head:
                self.weight_bytes += weight.nbytes // (2 if self.half_weights else 1)
            if name in setters:
                setters[name](weight)
            if self.head and name == head:
                self.head.pack(weight)
        self.fingerprint = fingerprint(model, self.dtype)                # identifies these weights

    def allocate(self, slots):
        """Allocate the cache and the state of each slot, with half the slots if memory is too small."""
        self.slots = slots
        self.graphs = {}
        self.cache = None
        self.prefix = []                     # ids whose keys and values the cache keeps, see find_prefix
        device = self.device
        if device.type == "cuda":
            torch.cuda.empty_cache()
        try:
            if self.config.mixer == "softmax":
                self.cache = KVCache(self.model, slots, self.context, device_type=self.device_type,
                                     deterministic=self.deterministic, graphs=self.cuda_graphs,
                                     by_length=self.fused)
            else:
                from engine.state_cache import StateCache
                self.cache = StateCache(self.config, slots, device)
        except Exception as e:
            if slots == 1 or not memory.is_out_of_memory(e):
                raise
        if self.cache is None:
            return self.allocate(slots // 2)
        # The newest token of each row, which no step has read yet, and its position.
        self.state = torch.zeros(2, slots, dtype=torch.long, device=device)
        # A sample's noise at all positions is drawn when it starts: within a step this takes twenty kernels.
        noise_device = "cpu" if device.type == "mps" else device
        self.noise = torch.zeros(slots, self.context, dtype=torch.float64, device=noise_device)
        # The number of steps of this decode(), and their draws.
        self.step_index = torch.zeros(1, dtype=torch.long, device=device)
        self.step_ids = torch.zeros(self.poll, slots, dtype=torch.long, device=device)
        self.step_logprobs = torch.zeros(self.poll, slots, dtype=torch.float32, device=device)

    def reset(self):
        """Forget earlier calls, which must not change a later one's last bits."""
        self.prefix = []
        if self.cache.grows:
            self.cache.resize(16)

    def start(self, slots, tokens, positions, streams, end):
        """Set the next inputs of slots, tokens [n] at positions [n], and their noise up to position `end`."""
        self.state[:, slots] = torch.stack((tokens, positions)).to(self.device)
        first = int(positions.min())
        noise = uniform(streams[:, None], torch.arange(first, end))
        self.noise[slots, first:end] = noise.to(self.noise.device)

    def copy_prompts(self, copies):
        """Copy prompts (slot, other slots, tokens). All slots are sent to the device at once: each transfer
        waits for it."""
        slots = torch.tensor([slot for _, others, _ in copies for slot in others], device=self.device)
        slots = slots.split([len(others) for _, others, _ in copies])
        for (source, _, n), others in zip(copies, slots):
            if len(others):
                self.cache.copy(source, others, n)

    def move(self, source, target, n):
        """Move a slot of n tokens."""
        self.cache.copy(source, slice(target, target + 1), n)
        for tensor in (self.state.T, self.noise):
            tensor[target] = tensor[source]

    def reorder(self, order):
        """Move slot order[i] to slot i."""
        order = torch.from_numpy(order)
        self.cache.reorder(order)
        for tensor in (self.state.T, self.noise):
            tensor[:len(order)] = tensor[order]

    def prefill(self, prompts):
        """Compute keys and values of prompts (slot, ids), in batches of similar length. Those of their common
        prefix, such as a system message or worked examples, are computed once."""
        self.cache.clear([slot for slot, _ in prompts])
        prompts = sorted((prompt for prompt in prompts if prompt[1]), key=lambda prompt: len(prompt[1]))
        P = self.find_prefix([ids for _, ids in prompts])
        while prompts:
            T = len(prompts[-1][1]) - P
            n = 1 if self.deterministic else max(1, PREFILL_TOKENS[self.device_type] // T)
            batch = prompts[-n:]
            prompts = prompts[:-n]
            padded = [ids[P:] + [0] * (P + T - len(ids)) for _, ids in batch]   # causal attention ignores it
            slots = torch.tensor([slot for slot, _ in batch], device=self.device)
            lengths = torch.tensor([len(ids) for _, ids in batch], device=self.device)
            positions = torch.arange(P, P + T, device=self.device)
            self.forward(padded, positions, self.cache.prefill(slots, lengths, P, T))

    def find_prefix(self, prompts):
        """Return the length of the prompts' common prefix whose keys and values the cache keeps: at least
        MIN_PREFIX, or 0. It is kept until reset(), and shortened once a prompt begins otherwise."""
        if not prompts or self.deterministic or self.config.mixer != "softmax":
            return 0
        alike = os.path.commonprefix(prompts)[:min(map(len, prompts)) - 1]
        kept = os.path.commonprefix([self.prefix, alike])
        if len(kept) < MIN_PREFIX <= len(alike) and len(prompts) > 1:
            kept = alike
            self.forward([kept], torch.arange(len(kept), device=self.device), self.cache.keep_prefix())
        if len(kept) < MIN_PREFIX:
            return 0
        self.prefix = kept
        return len(kept)

    def extend(self, replies):
        """Put replies (slot, first position, ids) behind samples: the last id is the next input; keys and
        values of the others are computed, in batches of similar length."""
        replies = sorted(replies, key=lambda reply: len(reply[2]))
        while replies:
            T = len(replies[-1][2]) - 1
            # Padding must end within the context, and costs a CPU as much as text.
            fewest = T // 2 if self.device_type == "cpu" else 0
            alike = [reply for reply in replies if reply[1] + T <= self.context and len(reply[2]) > fewest]
            longest = max(start for _, start, _ in alike) + T          # keys and values before it are copied
            n = 1 if self.deterministic else max(1, PREFILL_TOKENS[self.device_type] // max(T, longest // 16))
            batch = alike[-n:]
            replies = [reply for reply in replies if reply not in batch]
            slots, starts = torch.tensor([reply[:2] for reply in batch], device=self.device).T
            positions = starts[:, None] + torch.arange(T, device=self.device)
            end = max(start for _, start, _ in batch) + T
            padded = [ids[:-1] + [0] * (1 + T - len(ids)) for *_, ids in batch]
            self.forward(padded, positions, self.cache.extend(slots, positions, end))
            newest = torch.tensor([(ids[-1], start + len(ids) - 1) for _, start, ids in batch])
            self.state[:, slots] = newest.T.to(self.device)

    def forward(self, ids, positions, attentions):
        """Run the model on ids [B][T] at positions [B, T] or [T] for their keys and values."""
        x = torch.tensor(ids, device=self.device)
        # Training may have set other kernels, for another dtype.
        with hardware.sdpa_order() if self.device_type == "cuda" else nullcontext():
            self.model.hidden(x, positions, attentions)

    def decode(self, positions, paused, steps, sampling):
        """Draw the next tokens of slots 0 ... B-1, whose newest ones are at positions [B]. Return ids and
        logprobs [B, steps]. Rows that are paused [B] run along, and are set back each time."""
        B = len(positions)
        if paused.any():
            held = np.flatnonzero(paused)
            self.state[1, held] = torch.from_numpy(positions[held]).to(self.device)
        shape = self.step_shape(positions + steps)
        if B < shape[0]:
            self.state[1, B:shape[0]] = 0    # free slots that run along read few positions
        self.step_index.zero_()
        for _ in range(steps):
            self.launch(*shape, sampling)
        ids = self.step_ids[:steps, :B].T.cpu().numpy()
        logprobs = self.step_logprobs[:steps, :B].T.cpu().numpy()
        if np.isnan(logprobs).any():
            self.cache.storage.zero_()       # NaN would outlive its row: 0 * NaN is NaN
            raise FloatingPointError("The logits are not finite: check the model's weights, or use a "
                                     "dtype with a larger range.")
        return ids, logprobs

    def step_shape(self, lengths):
        """Return (B, RowGroups) of a step of rows that read `lengths` positions each (a list or array)."""
        lengths = np.asarray(lengths)        # Python's max of 512 takes 27 us longer (a Zen 5 core)
        self.cache.fit(int(lengths.max()))
        B = len(lengths)
        if self.cuda_graphs:
            B = min(self.slots, graph_size(B))
        if self.deterministic:
            B = self.slots
        return B, self.cache.groups(B, lengths)

    def launch(self, B, groups, sampling):
        """Run decode_step; on a GPU as a CUDA graph, captured when its shape first occurs."""
        if not self.cuda_graphs:
            return self.decode_step(B, groups, sampling)
        key = (B, groups, sampling)
        if key not in self.graphs:
            # Capturing runs the step once, so its in-place updates are undone.
            updated = [self.state, self.step_index, *self.cache.updated_in_place(B)]
            before = [tensor.clone() for tensor in updated]
            step = partial(self.decode_step, B, groups, sampling)
            self.graphs[key] = CUDAGraph(step, self.device, list(self.graphs.values()))
            for tensor, values in zip(updated, before):
                tensor.copy_(values)
        self.graphs[key].replay()

    def decode_step(self, B, groups, sampling):
        """Draw one more token of rows 0 ... B-1, in RowGroups, without waiting for the device."""
        tokens, positions = self.state[:, :B]
        logits = self.model.logits(self.next_hidden(tokens, positions, groups), self.head)
        if self.device.type == "mps":                        # no float64
            logits = logits.cpu()
        noise = self.noise[:B].gather(1, positions[:, None].to(self.noise.device))[:, 0]
        ids, logprobs = draw(logits, noise, sampling)
        self.step_ids[:, :B].index_copy_(0, self.step_index, ids[None].to(self.device))
        self.step_logprobs[:, :B].index_copy_(0, self.step_index, logprobs[None].to(self.device))
        tokens.copy_(ids)
        positions.add_(1).clamp_(max=self.context - 1)       # finished rows run until the next decode()
        self.step_index += 1

    def next_hidden(self, tokens, positions, groups):
        """Return final hidden states [B, C] of tokens [B] at positions [B]."""
        if self.fused:
            from engine import fused_step
            return fused_step.hidden(self.model, tokens, positions, self.cache.k, self.cache.v)
        attentions = self.cache.decode(positions, groups)
        # On a GPU this selects the fused kernel that takes a mask.
        with sdpa_kernel(SDPA_WITH_MASK, set_priority=True):
            return self.model.hidden(tokens[:, None], positions[:, None], attentions)[:, 0]
