"""Batched generation: continuous batching over slots, each prompt prefilled once for all of its samples.

    engine = Engine(model, sampling=Sampling(temperature=0.8, stop=(tokenizer.eos,)))
    for sample in engine.generate(Request(ids, num_samples=8, key=i) for i, ids in enumerate(prompts)):
        print(sample.request.key, sample.index, sample.ids, sample.reason)

Samples wait for free slots. A prompt is prefilled once and copied to the slots of its samples. All running
rows decode together, one token per step. The host launches steps and reads the results every `poll` steps.
With an `environment` (rollouts/episodes.py), a sample that stops may go on behind tokens that it gives.

Past keys and values (or recurrent states) live in a cache (engine/kv_cache.py, engine/state_cache.py).
Shapes: B running rows, T tokens of a prompt.
"""
import os
import platform
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import KW_ONLY, InitVar, dataclass, field
from functools import partial
from importlib.util import find_spec

import numpy as np
import torch
import torch.nn as nn
from torch.nn.attention import sdpa_kernel

from engine import kv_cache
from engine.gpu import CUDAGraph
from engine.kv_cache import PREFILL_TOKENS, KVCache, slots_that_fit
from engine.sampler import Sampling, StopStrings, draw, stream, uniform
from engine.state_cache import StateCache
from layers.lora import merged_weights
from layers.ops import SDPA_WITH_MASK
from model import GPT, on_meta
from runtime import hardware, memory, vitals

MIN_PREFIX = 16                              # shortest common beginning of prompts that is computed once
HALF_WEIGHTS_FROM = 2**24                    # weights; fewer than 64 MiB stay in a CPU's cache
PACKED_FROM = 2**18                          # weights of an fp32 matrix; packing costs smaller ones time
SORT_EVERY = 32                              # on a CPU: polls between two sorts of the rows by position
NO_STEPS = np.zeros((0, 0), dtype=np.int64), np.zeros((0, 2, 0), dtype=np.float32)     # of run_steps
DEVICE_TYPE_OVERRIDE = None                  # "cuda": take a GPU's branches on a CPU, for tests


@dataclass(frozen=True, eq=False)
class Request:
    ids: list                                # the prompt's token ids; any sequence or array
    num_samples: int = 1
    key: int = 0                             # identifies the question; seeds the noise, ids don't
    max_new_tokens: int = 128
    first_sample: int = 0                    # index of the first, to request samples in parts

    def __post_init__(self):
        object.__setattr__(self, "ids", [int(i) for i in self.ids])


@dataclass
class Sample:
    request: Request
    index: int                               # first_sample ... first_sample + num_samples - 1
    ids: list = field(default_factory=list)  # new token ids
    logprobs: list = field(default_factory=list)       # under the sampling distribution (greedy: T = 1), nats
    full_logprobs: list = field(default_factory=list)  # at T = 1 over all ids, with Sampling.full_logprobs
    reason: str = ""                         # stop | length | reply: the environment's, without room
    forced: list = field(default_factory=list)         # (first, last): the environment wrote ids[first:last];
                                             # their logprobs are 0
    pending: list = field(default_factory=list)        # its ids that the engine has yet to append
    replies: list = field(default_factory=list)        # its texts
    error: str | None = None                 # its failure, which ended the sample


@dataclass
class Progress:
    slots: int
    busy: int = 0                            # occupied slots
    tokens: int = 0                          # sampled so far
    steps: int = 0                           # of the model, all rows at once
    samples: int = 0                         # finished
    requests: int = 0                        # all samples finished
    in_flight: object = None                 # function -> [(Sample, its ids so far)]
    began: float = field(default_factory=time.perf_counter)

    @property
    def tokens_per_s(self):
        return self.tokens / (time.perf_counter() - self.began)


@dataclass
class WaitingRequest:
    """A request with samples that have no slot yet."""
    request: Request
    indices: deque                           # of these samples
    prefilled: bool = False                  # its keys and values are in the cache's last row


class Packed(nn.Module):
    """A linear layer with its weight packed in oneDNN's memory layout.

    On a CPU it is 1.6 times as fast as F.linear in bf16 and 2.7 times in fp32 (SmolLM2-360M, 20 rows).
    """

    def __init__(self, bias=None):
        super().__init__()
        self.bias = bias

    def pack(self, weight):
        self.in_features = weight.shape[1]
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight)

    def forward(self, x):
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")

    @staticmethod
    def works(device_type, dtype):
        x86 = platform.machine() in ("x86_64", "AMD64")
        if device_type != "cpu" or not x86 or not torch.backends.mkldnn.is_available():
            return False
        bf16 = dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return bf16 or dtype == torch.float32


class HalfPacked(Packed):
    """A linear layer with its weight in fp16 and products in fp32 (FBGEMM).

    It reads half the memory of fp32. Weights of a bf16 checkpoint are exact in fp16 from 6e-5 on.
    """

    def pack(self, weight):
        self.in_features = weight.shape[1]
        self.weight = torch.ops.quantized.linear_prepack_fp16(weight, None)

    def forward(self, x):
        y = torch.ops.quantized.linear_dynamic_fp16(x, self.weight)
        return y if self.bias is None else y + self.bias

    @staticmethod
    def works(device_type, dtype):
        return (Packed.works(device_type, dtype) and dtype == torch.float32
                and "fbgemm" in torch.backends.quantized.supported_engines)


def takes_half_weights(n_params, device_type, dtype):
    """Return whether Engine(half_weights=True) keeps the matrices of a model in fp16."""
    return n_params > HALF_WEIGHTS_FROM and HalfPacked.works(device_type, dtype)


# --- the engine ---

@dataclass(eq=False, repr=False)
class Engine:
    """Sample in batches with generate(); replace the weights with load().

    Deterministic: every matrix product has the same shape whatever else is in the batch, so that a sample is
    bitwise the same in any batch (at the same `slots` and `context`; on an Intel CPU, after
    hardware.ignore_alignment()). Otherwise only its noise is the same:
    logprobs agree to 1e-5 in fp32 without TF32, and in bf16 a different token is drawn occasionally.
    """
    model: InitVar[GPT]                      # copied; self.model is the engine's own
    slots: int | None = None                 # rows in flight; None: as many as fit into memory (MAX_SLOTS)
    context: int | None = None               # longest prompt plus completion, in tokens; None: block_size
    sampling: Sampling = Sampling()          # default for generate()
    _: KW_ONLY
    seed: int = 0
    dtype: torch.dtype | None = None         # of weights and cache; None: the model's
    device: torch.device | None = None       # None: the model's
    deterministic: bool = False
    decode: Callable | None = None           # ids -> text, needed for stop strings
    poll: int | None = None                  # steps between two reads of results; None: 8 on a GPU, else 1
    cuda_graphs: bool = True                 # on a GPU
    by_length: bool = True                   # decode by engine/triton_attention.py where it runs
    half_weights: bool = False               # on an x86 CPU in fp32: keep a large model's matrices in fp16

    @torch.inference_mode(False)
    def __post_init__(self, model):
        self.config = model.config
        self.device = self.device or model.head_weight.device
        self.kind = DEVICE_TYPE_OVERRIDE or self.device.type
        self.dtype = self.dtype or model.head_weight.dtype
        self.stop_strings = {}               # {texts: StopStrings} of all calls
        self.find_strings(self.sampling)
        block_size = self.config.block_size
        self.context = block_size if self.context is None else min(self.context, block_size)
        if self.poll is None:
            self.poll = 8 if self.kind == "cuda" else 1
        if self.poll < 1 or self.context < 2 or self.slots is not None and self.slots < 1:
            raise ValueError(f"slots={self.slots} and poll={self.poll} must be at least 1, "
                             f"and context={self.context} at least 2.")
        self.cuda_graphs = self.cuda_graphs and self.kind == "cuda"
        self.by_length = self.by_length and self.can_attend_by_length()
        self.half_weights &= takes_half_weights(model.n_params(), self.kind, self.dtype)
        self.build_model()
        self.load(model)
        self.allocate(self.slots or slots_that_fit(self.config, self.context, self.dtype, self.device))

    def can_attend_by_length(self):
        """Return whether the kernel of engine/triton_attention.py can be used: not for fp32, whose products
        tensor cores round, nor where Triton is not installed."""
        if self.kind != "cuda" or self.dtype == torch.float32 or self.config.mixer != "softmax":
            return False
        if self.deterministic or not find_spec("triton"):
            return False
        from engine.triton_attention import can_attend
        return can_attend(self.device, self.config.head_dim)

    @property
    def format(self):
        """Return the number formats for the log."""
        (name,) = [name for name, dtype in hardware.DTYPES.items() if dtype == self.dtype]
        return f"{name} with fp16 weights" if self.half_weights else name

    def build_model(self):
        """Build the engine's own model; load() fills in its weights."""
        attention = "sdpa"
        if self.kind == "cpu" and self.dtype == torch.bfloat16 and self.context <= 1024:
            attention = "math"
        if self.device.type == "cuda":
            capability = torch.cuda.get_device_capability(self.device)
            attention = "sdpa" if hardware.shares_heads(capability, self.dtype) else "sdpa_repeated"
        self.model = on_meta(self.config, attention)
        packed = HalfPacked if self.half_weights else Packed
        least = PACKED_FROM if self.dtype == torch.float32 and not self.half_weights else 0
        self.head = None
        if packed.works(self.kind, self.dtype):
            if self.model.head_weight.numel() >= least:
                self.model.head = None
                self.head = packed()
            for name, module in list(self.model.named_modules()):
                if isinstance(module, nn.Linear) and module.weight.numel() >= least:
                    self.model.set_submodule(name, packed(module.bias))
        self.model.to(self.dtype).to_empty(device=self.device).requires_grad_(False).eval()
        self.model.fill_rope_tables(self.dtype)

    @torch.no_grad()
    def load(self, model):
        """Copy the weights of a model of the same shape, with adapters merged in fp32.

        CUDA graphs stay valid. An unfinished generate() can't continue, since its keys and values are of old
        weights.
        """
        self.progress = None                 # Progress of the generate() that owns the slots
        model = getattr(model, "_orig_mod", model)            # unwrap a compiled model
        setters = {name: parameter.copy_ for name, parameter in self.model.named_parameters()}
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
        self.fingerprint = vitals.fingerprint(model, self.dtype)         # identifies these weights

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
                self.cache = KVCache(self.model, slots, self.context, kind=self.kind,
                                     deterministic=self.deterministic, graphs=self.cuda_graphs,
                                     by_length=self.by_length)
            else:
                self.cache = StateCache(self.config, slots, device)
        except Exception as e:
            if slots == 1 or not memory.is_out_of_memory(e):
                raise
        if self.cache is None:
            return self.allocate(slots // 2)

        # The newest token of each row and its position.
        self.state = torch.zeros(2, slots, dtype=torch.long, device=device)
        # A sample's noise at all positions is drawn when it starts: within a step this takes twenty kernels.
        noise_device = "cpu" if device.type == "mps" else device
        self.noise = torch.zeros(slots, self.context, dtype=torch.float64, device=noise_device)
        # The number of steps since the last poll, and their draws.
        self.step_index = torch.zeros(1, dtype=torch.long, device=device)
        self.step_ids = torch.zeros(self.poll, slots, dtype=torch.long, device=device)
        self.step_logprobs = torch.zeros(self.poll, 2, slots, dtype=torch.float32, device=device)
        # On the host, of each row: prompt tokens, new tokens so far and at most, ids, logprobs.
        self.prompt_tokens = np.zeros(slots, dtype=np.int64)
        self.new_tokens = np.zeros(slots, dtype=np.int64)
        self.max_new_tokens = np.zeros(slots, dtype=np.int64)
        self.turn_start = np.zeros(slots, dtype=np.int64)    # new tokens before the current turn
        columns = self.context + self.poll
        self.ids = np.zeros((slots, columns), dtype=np.int64)
        self.logprobs = np.zeros((slots, 2, columns), dtype=np.float32)
        self.paused = np.zeros(slots, dtype=bool)            # waits for the environment

    def row_arrays(self):
        """Return the per-slot arrays outside the cache, with slots as the first dimension."""
        counts = [self.prompt_tokens, self.new_tokens, self.max_new_tokens, self.turn_start]
        return [self.state.T, self.noise, *counts, self.ids, self.logprobs, self.paused]

    def bytes_read(self, lengths):
        """Return the minimum bytes read by the last generate(), for samples of lengths (prompt, new tokens).

        These are the weights in each step, and for each token the keys and values before it (or the states).
        """
        return self.progress.steps * self.weight_bytes + self.cache.bytes_read(lengths)

    # --- on the device ---

    def prefill(self, prompts):
        """Compute keys and values of prompts (slot, ids), in batches of similar length. Those of their common
        beginning, such as a system message or worked examples, are computed once."""
        self.cache.clear([slot for slot, _ in prompts])
        prompts = sorted((prompt for prompt in prompts if prompt[1]), key=lambda prompt: len(prompt[1]))
        P = self.find_prefix([ids for _, ids in prompts])
        while prompts:
            T = len(prompts[-1][1]) - P
            n = 1 if self.deterministic else max(1, PREFILL_TOKENS[self.kind] // T)
            batch = prompts[-n:]
            prompts = prompts[:-n]
            padded = [ids[P:] + [0] * (P + T - len(ids)) for _, ids in batch]  # causal attention ignores it
            slots = torch.tensor([slot for slot, _ in batch], device=self.device)
            lengths = torch.tensor([len(ids) for _, ids in batch], device=self.device)
            self.forward(padded, torch.tensor([P]), self.cache.prefill(slots, lengths, P, T))

    def find_prefix(self, prompts):
        """Return the number of ids at which all prompts begin alike and whose keys and values the cache
        keeps: at least MIN_PREFIX, or 0. They are kept during a generate(), fewer once a prompt begins
        otherwise."""
        if not prompts or self.deterministic or self.config.mixer != "softmax":
            return 0
        alike = os.path.commonprefix(prompts)[:min(map(len, prompts)) - 1]
        kept = os.path.commonprefix([self.prefix, alike])
        if len(kept) < MIN_PREFIX <= len(alike) and len(prompts) > 1:
            kept = alike
            self.forward([kept], torch.tensor([0]), self.cache.keep_prefix())
        if len(kept) < MIN_PREFIX:
            return 0
        self.prefix = kept
        return len(kept)

    def extend(self, rows):
        """Put the replies of the environment behind the samples: compute their keys and values, in batches of
        equal length, and let the rows go on."""
        by_length = {}                       # {tokens: slots}
        for i, row in enumerate(rows):
            if row and row.pending:
                by_length.setdefault(len(row.pending), []).append(i)
        for T, slots in by_length.items():
            # The keys and values before them are copied.
            end = int((self.prompt_tokens + self.new_tokens)[slots].max()) + T
            n = max(1, PREFILL_TOKENS[self.kind] // max(T, end // 16))
            n = 1 if self.deterministic else n
            for k in range(0, len(slots), n):
                self.extend_batch(rows, slots[k:k + n], T)

    def extend_batch(self, rows, slots, T):
        """Put replies of T tokens behind the samples in these slots."""
        last = self.new_tokens[slots] - 1
        first = self.prompt_tokens[slots] + last             # position of the newest token, not computed yet
        replies = np.array([rows[i].pending for i in slots])
        inputs = np.concatenate((self.ids[slots, last][:, None], replies[:, :-1]), 1)
        starts = torch.from_numpy(first)
        attentions = self.cache.extend(torch.tensor(slots), starts, T)
        self.forward(inputs.tolist(), starts[:, None], attentions)
        self.state[:, slots] = torch.from_numpy(np.stack((replies[:, -1], first + T))).to(self.device)
        for i, n in zip(slots, self.new_tokens[slots].tolist()):
            row = rows[i]
            self.ids[i, n:n + T] = row.pending
            self.logprobs[i, :, n:n + T] = 0
            row.forced.append((n, n + T))
            row.pending = []
        self.new_tokens[slots] += T
        self.turn_start[slots] = self.new_tokens[slots]
        room = self.context - self.prompt_tokens[slots]
        self.max_new_tokens[slots] = np.minimum(self.max_new_tokens[slots] + T, room)
        self.paused[slots] = False

    def forward(self, ids, starts, attentions):
        """Run the model on ids [B][T] for their keys and values; rows begin at positions `starts` [B, 1], or
        all at [1]."""
        x = torch.tensor(ids, device=self.device)
        positions = (starts + torch.arange(x.shape[1])).to(self.device)
        # Training may have set other kernels, for another dtype; behind other positions there is a mask.
        kernels = sdpa_kernel(SDPA_WITH_MASK, set_priority=True) if starts.any() else hardware.sdpa_order()
        with kernels if self.kind == "cuda" else nullcontext():
            self.model.hidden(x, positions, attentions)

    def decode_step(self, B, groups, sampling):
        """Draw one more token of rows 0 ... B-1, in RowGroups, without waiting for the device."""
        tokens, positions = self.state[:, :B]
        attentions = self.cache.decode(positions, groups)
        # On a GPU this selects the fused kernel that takes a mask.
        with sdpa_kernel(SDPA_WITH_MASK, set_priority=True):
            h = self.model.hidden(tokens[:, None], positions[:, None], attentions)[:, 0]
        logits = self.model.logits(h, self.head)
        if self.device.type == "mps":                        # no float64
            logits = logits.cpu()
        noise = self.noise[:B].gather(1, positions[:, None].to(self.noise.device))[:, 0]
        ids, logprobs = draw(logits, noise, sampling)
        full_logprobs = logprobs
        if sampling.full_logprobs:
            full_logprobs = logits.gather(1, ids[:, None])[:, 0] - logits.logsumexp(-1)
        both = torch.stack((logprobs, full_logprobs))
        self.step_ids[:, :B].index_copy_(0, self.step_index, ids[None].to(self.device))
        self.step_logprobs[:, :, :B].index_copy_(0, self.step_index, both[None].to(self.device))
        tokens.copy_(ids)
        positions.add_(1).clamp_(max=self.context - 1)       # finished rows run until the next poll
        self.step_index += 1

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

    # --- on the host ---

    @torch.inference_mode()
    def generate(self, requests, progress=None, sampling=None, environment=None):
        """Yield Samples as they finish.

        requests: an iterable, read only when slots are free.
        progress: called with a Progress after each poll.
        sampling: for this call; None: the engine's.
        environment: ask(Sample) is called when a sample stops, and returns whether it is to go on; then
        replies(wait) returns [(Sample, ids to put behind it, or None: it has ended)], and waits for at least
        one if asked to. Other samples run on meanwhile. max_new_tokens counts a sample's own tokens and, for
        themselves, the environment's.

        When out of memory, continue with half the slots and restart the samples in flight. Their noise is the
        same, and so is the result.
        """
        sampling = sampling or self.sampling
        self.find_strings(sampling)          # raises an error without `decode`
        if environment and self.config.mixer != "softmax":
            raise ValueError(f"mixer={self.config.mixer} can't go on behind the text of an environment: use "
                             "a model with mixer=softmax, or a task without respond().")
        requests = iter(requests)
        waiting = deque()                    # WaitingRequests
        rows = []                            # rows[i]: the Sample in slot i, or None
        done = Counter()                     # {unfinished request: number of finished samples}
        self.prefix = []                     # an earlier call must not change this one's last bits
        counters = Progress(self.slots, in_flight=partial(self.in_flight, rows))
        self.progress = counters
        self.polls = 0
        self.environment = environment
        if self.cache.grows:
            self.cache.resize(16)
        while True:
            ended = self.receive(rows) if environment else []
            self.enqueue(requests, waiting, self.slots - sum(row is not None for row in rows))
            results = None
            try:
                self.admit(rows, waiting)
                if not rows and not ended:
                    return
                if environment:
                    self.extend(rows)
                results = self.run_steps(rows, sampling)
            except Exception as e:
                if self.slots == 1 or not memory.is_out_of_memory(e):
                    raise
            if results is None:              # not within `except`, where the exception holds memory
                waiting = requeue(rows, waiting)
                rows.clear()
                self.allocate(self.slots // 2)
                counters.slots = self.slots
                results = NO_STEPS
            stopped = self.collect(rows, *results, sampling)
            finished = ended + stopped
            for sample in finished:
                request = sample.request
                done[request] += 1
                if done[request] == request.num_samples:
                    del done[request]
                    counters.requests += 1
            counters.samples += len(finished)
            counters.busy = len(rows) - len(stopped)
            if progress:
                with torch.inference_mode(False):
                    progress(counters)
            yield from finished
            if self.progress is not counters:
                raise RuntimeError("Another generate() or load() took over this engine's slots: "
                                   "finish one call before the next, or make two engines.")

    def receive(self, rows):
        """Take the environment's replies to samples in `rows`; return the Samples that end, out of `rows`."""
        slots = {id(row): i for i, row in enumerate(rows) if row}
        wait = bool(rows) and None not in rows and bool(self.paused[:len(rows)].all())
        with torch.inference_mode(False):
            replies = self.environment.replies(wait)
        ended = []
        for sample, ids in replies:
            i = slots.get(id(sample))
            if i is None:                    # out of memory since, and sampled again
                continue
            if ids and self.has_room(i, sample, len(ids)):
                sample.pending = ids
                continue
            if ids:
                at_limit = self.new_tokens[i] == self.max_new_tokens[i]
                sample.reason = "length" if at_limit else "reply"
            rows[i] = None
            ended.append(sample)
        return ended

    def has_room(self, i, sample, n):
        """Return whether n ids of the environment and another token fit behind the sample in slot i."""
        forced = forced_tokens(sample.forced)
        end = self.prompt_tokens[i] + self.new_tokens[i] + n
        limit = sample.request.max_new_tokens
        return self.new_tokens[i] < self.max_new_tokens[i] and forced + n <= limit and end < self.context

    def in_flight(self, rows):
        """Return [(Sample, its ids so far)] of the running rows."""
        return [(row, self.ids[i, :self.new_tokens[i]].tolist()) for i, row in enumerate(rows) if row]

    def check(self, request):
        """Raise ValueError for a request that can't be sampled."""
        n = len(request.ids)
        if not 0 < n < self.context:
            raise ValueError(f"A prompt of {n} tokens can't be continued: give 1 to {self.context - 1} "
                             f"in a context of {self.context}.")
        last = self.config.vocab_size - 1
        for i in (min(request.ids), max(request.ids)):
            if not 0 <= i <= last:
                raise ValueError(f"A prompt has token id {i}, but the model's ids are 0 to {last}: "
                                 "encode it with the model's tokenizer.")
        if not all(-2**63 <= number < 2**63 for number in (request.key, self.seed)):
            raise ValueError(f"key={request.key} and seed={self.seed} must fit 64 bits.")
        if request.num_samples < 1 or request.max_new_tokens < 1:
            raise ValueError(f"num_samples={request.num_samples} and max_new_tokens={request.max_new_tokens} "
                             "must be at least 1.")

    def enqueue(self, requests, waiting, free):
        """Read Requests, outside inference mode, until their samples fill the free slots."""
        with torch.inference_mode(False):
            while sum(len(pending.indices) for pending in waiting) < free:
                request = next(requests, None)
                if request is None:
                    return
                self.check(request)
                first = request.first_sample
                waiting.append(WaitingRequest(request, deque(range(first, first + request.num_samples))))

    def admit(self, rows, waiting):
        """Move waiting samples into free slots.

        A prompt is prefilled in one slot, without its last token, which is the input of the first decoding
        step. It is copied to the other slots, and to the cache's last row if more samples are waiting.
        """
        admitted = self.schedule(rows, waiting)
        self.cache.fit(max((len(pending.request.ids) for pending, _ in admitted), default=0))
        self.prefill([(slots[0], pending.request.ids[:-1]) for pending, slots in admitted
                      if not pending.prefilled])
        last_row = self.slots
        for pending, slots in admitted:
            source = last_row if pending.prefilled else slots[0]
            pending.prefilled = bool(pending.indices)
            targets = {*slots, last_row} if pending.prefilled else {*slots}
            targets.discard(source)
            if targets:
                self.cache.copy(source, [*targets], len(pending.request.ids) - 1)
        if admitted:
            self.start(rows, [slot for _, slots in admitted for slot in slots])
        self.compact(rows)

    def schedule(self, rows, waiting):
        """Put waiting samples into free slots of `rows`; return [(WaitingRequest, its new slots)]."""
        admitted = []
        free = [i for i, row in enumerate(rows) if row is None]
        free += range(len(rows), self.slots)
        while free and waiting:
            pending = waiting[0]
            slots = free[:len(pending.indices)]
            free = free[len(slots):]
            for slot in slots:
                rows[slot:slot + 1] = [Sample(pending.request, pending.indices.popleft())]   # or appends
            if not pending.indices:
                waiting.popleft()
            admitted.append((pending, slots))
        return admitted

    def start(self, rows, slots):
        """Initialise the state of these slots for new samples."""
        samples = [rows[slot] for slot in slots]
        requests = [sample.request for sample in samples]
        lengths = np.array([len(request.ids) for request in requests])
        limits = np.array([request.max_new_tokens for request in requests])
        self.prompt_tokens[slots] = lengths
        self.new_tokens[slots] = 0
        self.turn_start[slots] = 0
        self.max_new_tokens[slots] = np.minimum(limits, self.context - lengths)
        self.paused[slots] = False

        tokens = torch.tensor([request.ids[-1] for request in requests])
        state = torch.stack((tokens, torch.from_numpy(lengths - 1)))
        self.state[:, slots] = state.to(self.device)

        keys = torch.tensor([request.key for request in requests])
        indices = torch.tensor([sample.index for sample in samples])
        first = int(lengths.min()) - 1
        last = self.context if self.environment else min(self.context, int((lengths + limits).max()))
        noise = uniform(stream(self.seed, keys, indices)[:, None], torch.arange(first, last))
        self.noise[slots, first:last] = noise.to(self.noise.device)

    def compact(self, rows):
        """Move the last rows into empty slots."""
        while None in rows:
            sample = rows.pop()
            if sample is None:
                continue
            source = len(rows)
            target = rows.index(None)
            rows[target] = sample
            self.cache.copy(source, [target], self.prompt_tokens[source] + self.new_tokens[source])
            for array in self.row_arrays():
                array[target] = array[source]

    def run_steps(self, rows, sampling):
        """Decode until the next poll; return ids [B, steps] and logprobs [B, 2, steps]."""
        B = len(rows)
        paused = self.paused[:B]
        if paused.all():
            return NO_STEPS
        steps = min(self.poll, int((self.max_new_tokens - self.new_tokens)[:B][~paused].max()))
        if paused.any():                     # these rows run along; what they write is overwritten later
            held = np.flatnonzero(paused)
            positions = torch.from_numpy((self.prompt_tokens + self.new_tokens)[held] - 1)
            self.state[1, held] = positions.to(self.device)
        self.polls += 1
        if self.cache.grows and B > kv_cache.ROW_GROUP_SIZE and self.polls % SORT_EVERY == 0:
            self.sort(rows)
        shape = self.step_shape((self.prompt_tokens + self.new_tokens)[:B] - 1 + steps)
        self.step_index.zero_()
        self.progress.steps += steps
        for _ in range(steps):
            self.launch(*shape, sampling)
        ids = self.step_ids[:steps, :B].T
        logprobs = self.step_logprobs[:steps, :, :B].permute(2, 1, 0)
        return ids.cpu().numpy(), logprobs.cpu().numpy()

    def sort(self, rows):
        """Sort rows by position, so that the rows of a group read about the same number of positions."""
        lengths = (self.prompt_tokens + self.new_tokens)[:len(rows)]
        order = np.argsort(-lengths, kind="stable")
        index = torch.from_numpy(order)
        self.cache.reorder(index)
        for array in self.row_arrays():
            array[:len(rows)] = array[index if isinstance(array, torch.Tensor) else order]
        rows[:] = [rows[i] for i in order]

    def step_shape(self, lengths):
        """Return (B, RowGroups) of a step of rows that read `lengths` positions each (a list or array)."""
        lengths = np.asarray(lengths)        # Python's max of 512 takes 27 us longer (a Zen 5 core)
        self.cache.fit(int(lengths.max()))
        B = len(lengths)
        if self.cuda_graphs:
            B = min(self.slots, 1 << (B - 1).bit_length())
        if self.deterministic:
            B = self.slots
        return B, self.cache.groups(B, lengths)

    def collect(self, rows, ids, logprobs, sampling):
        """Record new ids [B, steps] and logprobs [B, 2, steps]; return finished Samples, out of `rows`.

        This is vectorised: a Python loop over 512 rows takes as long as two GPU steps of a small model.
        """
        if not ids.size:
            return []
        if np.isnan(logprobs[:, 0]).any():
            self.cache.storage.zero_()       # NaN would outlive its row: 0 * NaN is NaN
            raise FloatingPointError("The logits are not finite: check the model's weights, or use a "
                                     "dtype with a larger range.")
        B, steps = ids.shape
        slots = np.arange(B)[:, None]
        columns = self.new_tokens[:B, None] + np.arange(steps)
        self.ids[slots, columns] = ids
        for kind in range(1 + sampling.full_logprobs):
            self.logprobs[slots, kind, columns] = logprobs[:, kind]
        kept, stopped = self.find_stops(ids, sampling)
        self.new_tokens[:B] += kept
        self.progress.tokens += int(kept.sum())
        at_limit = (self.new_tokens == self.max_new_tokens)[:B] & ~self.paused[:B]
        finished = []
        for i in np.flatnonzero(stopped | at_limit):
            n = self.new_tokens[i]
            sample = rows[i]
            sample.ids = self.ids[i, :n].tolist()
            sample.logprobs = self.logprobs[i, 0, :n].tolist()
            if sampling.full_logprobs:
                sample.full_logprobs = self.logprobs[i, 1, :n].tolist()
            sample.reason = "stop" if stopped[i] else "length"
            if stopped[i] and self.environment and self.environment.ask(sample):
                self.paused[i] = True
                continue
            rows[i] = None
            finished.append(sample)
        return finished

    def find_stops(self, ids, sampling):
        """Return how many new ids [B, steps] each row keeps, and whether it stopped."""
        B, steps = ids.shape
        remaining = (self.max_new_tokens - self.new_tokens)[:B]
        is_stop = (ids[..., None] == np.array(sampling.stop)).any(-1)            # faster than np.isin
        is_stop &= np.arange(steps) < remaining[:, None]
        stopped = is_stop.any(1)
        kept = np.where(stopped, is_stop.argmax(1) + 1, np.minimum(remaining, steps))
        strings = self.find_strings(sampling)
        completed = strings.may_complete(ids).any(1) if strings else np.zeros(B, dtype=bool)
        for i in np.flatnonzero(completed):
            count = self.new_tokens[i]
            before = self.ids[i, max(self.turn_start[i], count - strings.tail):count].tolist()
            n = strings.completed_by(ids[i, :kept[i]].tolist(), before)
            if n:
                kept[i] = n
                stopped[i] = True
        kept[self.paused[:B]] = 0
        stopped[self.paused[:B]] = False
        return kept, stopped

    def find_strings(self, sampling):
        """Return the cached StopStrings of a Sampling, None if it has none; ValueError without `decode`."""
        strings = sampling.stop_strings
        if strings and not self.decode:
            raise ValueError("Stop strings need a function from ids to text: pass decode=tokenizer.decode "
                             "to Engine.")
        if strings and strings not in self.stop_strings:
            self.stop_strings[strings] = StopStrings(strings, self.decode, self.config.vocab_size)
        return self.stop_strings.get(strings)


def forced_tokens(forced):
    """Return the number of tokens in a sample's spans (first, last)."""
    return sum(last - first for first, last in forced)


def requeue(rows, waiting):
    """Return the waiting queue with the samples in flight first."""
    samples = [(row.request, row.index) for row in rows if row]
    samples += [(pending.request, index) for pending in waiting for index in pending.indices]
    queue = {}
    for request, index in samples:
        queue.setdefault(request, WaitingRequest(request, deque())).indices.append(index)
    return deque(queue.values())
