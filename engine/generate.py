"""Batched generation with a static KV cache: slots that are refilled, prompts that are computed once.

    engine = Engine(model, sampling=Sampling(temperature=0.8, stop=(tokenizer.eos,)))
    for sample in engine.generate(Request(ids, num_samples=8, key=i) for i, ids in enumerate(prompts)):
        print(sample.request.key, sample.index, sample.ids, sample.reason)

Samples wait until slots are free. A prompt is computed once (prefill) and its keys and values are copied to
the slots of its samples. All running rows are decoded together, a token a step. The host launches steps and
polls the results every `poll` steps.

What rows read of what was before, keys and values or a state, is a cache's (engine/kv_cache.py, engine/state_cache.py).
Shapes: B running rows, T tokens of a prompt.
"""
import platform
import time
from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
import torch.nn as nn
from torch.nn.attention import sdpa_kernel

from engine.gpu import CUDAGraph, has_varlen_attention
from engine.kv_cache import KVCache, prefill_tokens, slots_that_fit
from engine.sampler import Sampling, StopStrings, draw, stream, uniform
from engine.state_cache import StateCache
from layers.lora import merged_weights
from layers.ops import SDPA_WITH_MASK
from model import on_meta
from runtime import hardware, memory, vitals

SORT_EVERY = 32                              # on a CPU: polls after which rows are sorted by position
ACT_AS = None                                # cuda: take a GPU's branches on a CPU, as tests do


@dataclass(frozen=True, eq=False)
class Request:
    ids: list                                # the prompt's token ids; or an array of them
    num_samples: int = 1
    key: int = 0                             # names the question: noise depends on it, not on the ids
    max_new_tokens: int = 128
    first_sample: int = 0                    # index of the first: samples can be asked for in parts

    def __post_init__(self):
        object.__setattr__(self, "ids", [int(i) for i in self.ids])


@dataclass
class Sample:
    request: Request
    index: int                               # first_sample ... first_sample + num_samples - 1
    ids: list = field(default_factory=list)  # new token ids
    logprobs: list = field(default_factory=list)       # of ids, nats, as they were sampled (greedy: at T = 1)
    full_logprobs: list = field(default_factory=list)  # at T = 1 over all ids, if asked for
    reason: str = ""                         # stop | length


@dataclass
class Progress:
    slots: int
    busy: int = 0                            # of them
    tokens: int = 0                          # sampled so far
    steps: int = 0                           # of the model, all rows at once
    samples: int = 0                         # finished
    requests: int = 0                        # all of whose samples are finished
    in_flight: object = None                 # function -> [(Sample, its ids so far)]
    began: float = field(default_factory=time.perf_counter)

    @property
    def tokens_per_s(self):
        return self.tokens / (time.perf_counter() - self.began)


@dataclass
class WaitingRequest:
    """A request some of whose samples have no slot yet."""
    request: Request
    indices: deque                           # of the samples that wait
    slots: list = field(default_factory=list)          # of samples that are being admitted
    prefilled: bool = False                  # its keys and values are in the cache's last row


class Packed(nn.Module):
    """A linear layer whose weight lies in memory as oneDNN reads it.

    On a CPU, at 20 rows of SmolLM2-360M, 1.6 times the speed of F.linear in bf16 and 2.7 times in fp32.
    """

    def __init__(self, bias=None):
        super().__init__()
        self.bias = bias

    def pack(self, weight):
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight)

    def forward(self, x):
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")

    @staticmethod
    def works(device_type, dtype):
        if device_type != "cpu" or platform.machine() not in ("x86_64", "AMD64"):
            return False
        if not torch.backends.mkldnn.is_available():
            return False
        if dtype == torch.bfloat16:
            return torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return dtype == torch.float32


# --- the engine ---

class Engine:
    """generate() is all there is to it; load() gives it new weights.

    slots: rows in flight, None: as many as fit the free memory (MOST_SLOTS).
    context: longest prompt and completion together, in tokens.
    sampling: of calls of generate() that bring none.
    dtype: of weights and cache.
    decode: ids -> text, needed for stop strings.
    poll: steps between two polls of the results.
    device: of weights and cache; None: the model's.
    decoding: mask | length, how a GPU attends in a step (engine/gpu.py); length falls back to mask where it can't be had.
    deterministic: every product has the same shape whoever is in the batch, so that a sample is the same bit
    for bit, in company or alone (at the same `slots` and `context`). Otherwise its noise is, and its
    log-probabilities are up to rounding: 1e-5 in fp32 without TF32; in bf16 now and then another token is
    drawn.
    """

    @torch.inference_mode(False)
    def __init__(self, model, slots=None, context=None, sampling=None, seed=0, dtype=None,
                 deterministic=False, decode=None, poll=None, cuda_graphs=True, device=None, decoding="mask"):
        self.config = model.config
        self.device = device or model.head_weight.device
        self.kind = ACT_AS or self.device.type
        self.dtype = dtype or model.head_weight.dtype
        self.seed = seed
        self.decode = decode
        self.sampling = sampling or Sampling()
        self.check_sampling(self.sampling)
        self.stop_strings = {}               # StopStrings of all calls, by their texts
        block_size = self.config.block_size
        self.context = block_size if context is None else min(context, block_size)
        self.deterministic = deterministic
        default_poll = 8 if self.kind == "cuda" else 1
        self.poll = default_poll if poll is None else poll
        self.cuda_graphs = cuda_graphs and self.kind == "cuda"
        if self.poll < 1 or self.context < 2 or slots is not None and slots < 1:
            raise ValueError(f"slots={slots} and poll={self.poll} must be at least 1, "
                             f"and context={self.context} at least 2.")
        self.progress = None                 # of the generate() whose rows are in the slots
        self.build_model()
        self.load(model)
        if slots is None:
            slots = slots_that_fit(self.config, self.context, self.dtype, self.device)
        self.allocate(slots)
        by_length = self.kind == "cuda" and self.dtype != torch.float32 and self.config.mixer == "softmax"
        self.decoding = decoding if by_length and not deterministic and has_varlen_attention() else "mask"

    def build_model(self):
        """Make a model of the engine's own, whose weights load() fills in."""
        attention = "sdpa"
        if self.kind == "cpu" and self.dtype == torch.bfloat16 and self.context <= 1024:
            attention = "math"
        if self.device.type == "cuda":
            capability = torch.cuda.get_device_capability(self.device)
            attention = "sdpa" if hardware.shares_heads(capability, self.dtype) else "sdpa_repeated"
        self.model = on_meta(self.config, attention)
        self.head = Packed() if Packed.works(self.kind, self.dtype) else None
        if self.head:
            self.model.head = None
            for name, module in list(self.model.named_modules()):
                if isinstance(module, nn.Linear):
                    self.model.set_submodule(name, Packed(module.bias))
        self.model.to(self.dtype).to_empty(device=self.device).requires_grad_(False).eval()
        self.model.fill_rotations(self.dtype)

    @torch.no_grad()
    def load(self, model):
        """Take over the weights of a model of the same shape, adapters merged in fp32.

        Graphs stay valid; a generate() that has not come to its end can't go on: its keys and values are the
        old weights'.
        """
        self.progress = None
        model = getattr(model, "_orig_mod", model)            # of a compiled one
        takers = {name: parameter.copy_ for name, parameter in self.model.named_parameters()}
        for name, module in self.model.named_modules():
            if isinstance(module, Packed):
                takers[f"{name}.weight"] = module.pack
        head = "head.weight" if model.head else "token_embedding.weight"
        in_step = 0                          # weights that a step reads
        for name, weight in merged_weights(model, self.dtype):
            if name.startswith("blocks.") or name == head:
                in_step += weight.numel()
            if name in takers:
                takers[name](weight.to(self.dtype))
            if self.head and name == head:
                self.head.pack(weight.to(self.dtype))
        self.weight_bytes = self.dtype.itemsize * in_step
        self.fingerprint = vitals.fingerprint(model, self.dtype)         # tells these weights from others

    def allocate(self, slots):
        """Make the cache and the state of each slot; of half the slots if they don't fit."""
        self.slots = slots
        self.graphs = {}
        self.cache = None
        device = self.device
        if device.type == "cuda":
            torch.cuda.empty_cache()
        try:
            if self.config.mixer == "softmax":
                self.cache = KVCache(self.config, slots, self.context, self.dtype, device, self.kind,
                                     self.model.backend, self.deterministic, self.cuda_graphs)
            else:
                self.cache = StateCache(self.config, slots, device)
        except Exception as e:
            if slots == 1 or not memory.is_out_of_memory(e):
                raise
        if self.cache is None:
            return self.allocate(slots // 2)

        # Of each row the newest token and its position.
        self.state = torch.zeros(2, slots, dtype=torch.long, device=device)
        # A sample's noise at each position, drawn when it gets its slot: in a step it takes twenty kernels.
        noise_device = "cpu" if device.type == "mps" else device
        self.noise = torch.zeros(slots, self.context, dtype=torch.float64, device=noise_device)
        # The number of steps since the last poll, and what they drew.
        self.step_index = torch.zeros(1, dtype=torch.long, device=device)
        self.step_ids = torch.zeros(self.poll, slots, dtype=torch.long, device=device)
        self.step_logprobs = torch.zeros(self.poll, 2, slots, dtype=torch.float32, device=device)
        # On the host: tokens of each row's prompt, new ones so far, new ones at most; what they are.
        self.prompt_tokens = np.zeros(slots, dtype=np.int64)
        self.new_tokens = np.zeros(slots, dtype=np.int64)
        self.max_new_tokens = np.zeros(slots, dtype=np.int64)
        columns = self.context + self.poll
        self.ids = np.zeros((slots, columns), dtype=np.int64)
        self.logprobs = np.zeros((slots, 2, columns), dtype=np.float32)

    def row_arrays(self):
        """Return what is kept of each slot beside the cache, slots first."""
        counts = [self.prompt_tokens, self.new_tokens, self.max_new_tokens]
        return [self.state.T, self.noise, *counts, self.ids, self.logprobs]

    def bytes_read(self, lengths):
        """Return what the last generate() had to read at least, for samples of lengths (prompt, new tokens).

        That is the weights in each step, and for each token the keys and values of those before it (or the
        states).
        """
        return self.progress.steps * self.weight_bytes + self.cache.bytes_read(lengths)

    # --- on the device ---

    def prefill(self, prompts):
        """Compute keys and values of prompts (slot, ids), some of about the same length at a time."""
        self.cache.clear([slot for slot, _ in prompts])
        prompts = [prompt for prompt in prompts if prompt[1]]
        prompts.sort(key=lambda prompt: len(prompt[1]))
        while prompts:
            T = len(prompts[-1][1])
            n = 1 if self.deterministic else max(1, prefill_tokens(self.kind) // T)
            batch = prompts[-n:]
            prompts = prompts[:-n]
            padded = [ids + [0] * (T - len(ids)) for _, ids in batch]  # causal rows never see padding
            x = torch.tensor(padded, device=self.device)
            slots = torch.tensor([slot for slot, _ in batch], device=self.device)
            lengths = torch.tensor([len(ids) for _, ids in batch], device=self.device)
            attentions = self.cache.prefill(slots, lengths)
            # Whatever kernel training was given, in another dtype perhaps.
            with hardware.sdpa_order() if self.kind == "cuda" else nullcontext():
                self.model.hidden(x, None, attentions)

    def decode_step(self, B, groups, sampling):
        """Draw one more token of rows 0 ... B-1, in RowGroups. Nothing here waits for the device."""
        tokens, positions = self.state[:, :B]
        attentions = self.cache.decode(positions, groups, self.decoding)
        # On a GPU, of the fused kernels the one that takes a mask.
        with sdpa_kernel(SDPA_WITH_MASK, set_priority=True):
            h = self.model.hidden(tokens[:, None], positions[:, None], attentions)[:, 0]
        logits = self.model.logits(h, self.head)
        if self.device.type == "mps":                        # which has no float64
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
        positions.add_(1).clamp_(max=self.context - 1)       # a row that is over runs on until the next poll
        self.step_index += 1

    def launch(self, B, groups, sampling):
        """Run decode_step; on a GPU as a CUDA graph, recorded when its shape comes for the first time."""
        if not self.cuda_graphs:
            return self.decode_step(B, groups, sampling)
        key = (B, groups, sampling)
        if key not in self.graphs:
            changed = [self.state, self.step_index, *self.cache.changed(B)]
            before = [tensor.clone() for tensor in changed]
            step = partial(self.decode_step, B, groups, sampling)
            self.graphs[key] = CUDAGraph(step, self.device, list(self.graphs.values()))
            for tensor, values in zip(changed, before):
                tensor.copy_(values)
        self.graphs[key].replay()

    # --- on the host ---

    @torch.inference_mode()
    def generate(self, requests, progress=None, sampling=None):
        """Yield Samples as they finish.

        requests: drawn from the iterable when slots are free, and no sooner.
        progress: called with a Progress after each poll.
        sampling: of this call; None: the engine's.
        Out of memory, it goes on with half the slots and begins the samples in flight again; their noise
        makes them the same.
        """
        sampling = sampling or self.sampling
        self.check_sampling(sampling)
        requests = iter(requests)
        waiting = deque()                    # of WaitingRequests
        rows = []                            # rows[i] is the Sample in slot i
        unfinished = {}                      # number of samples, by request
        counters = Progress(self.slots, in_flight=partial(self.in_flight, rows))
        self.progress = counters
        self.polls = 0
        if self.cache.grows:
            self.cache.resize(16)
        while True:
            self.enqueue(requests, waiting, self.slots - sum(row is not None for row in rows))
            out_of_memory = False
            try:
                self.admit(rows, waiting)
                if not rows:
                    return
                ids, logprobs = self.run_steps(rows, sampling)
            except Exception as e:
                if self.slots == 1 or not memory.is_out_of_memory(e):
                    raise
                out_of_memory = True
            if out_of_memory:                # by now the exception, with all it held, is gone
                waiting = requeue(rows, waiting)
                rows.clear()
                self.allocate(self.slots // 2)
                counters.slots = self.slots
                continue
            finished = self.collect(rows, ids, logprobs, sampling)
            for sample in finished:
                request = sample.request
                unfinished[request] = unfinished.get(request, request.num_samples) - 1
                if unfinished[request] == 0:
                    del unfinished[request]
                    counters.requests += 1
            counters.samples += len(finished)
            counters.busy = len(rows) - len(finished)
            if progress:
                with torch.inference_mode(False):
                    progress(counters)
            yield from finished
            if self.progress is not counters:
                raise RuntimeError("Another generate() or a load() has taken over this engine's slots: "
                                   "let one finish before the next, or make two engines.")

    def in_flight(self, rows):
        """Return [(Sample, its ids so far)] of the running rows."""
        return [(row, self.ids[i, :self.new_tokens[i]].tolist()) for i, row in enumerate(rows) if row]

    def check(self, request):
        """Raise ValueError with one sentence for what can't be sampled."""
        n = len(request.ids)
        if not 0 < n < self.context:
            raise ValueError(f"A prompt of {n} tokens can't be continued: give 1 to {self.context - 1}, "
                             f"the context being {self.context}.")
        smallest = min(request.ids)
        extreme = smallest if smallest < 0 else max(request.ids)
        last = self.config.vocab_size - 1
        if not 0 <= extreme <= last:
            raise ValueError(f"A prompt has the token id {extreme}, and the model's end at {last}: "
                             "encode it with the model's tokenizer.")
        if not all(-2**63 <= number < 2**63 for number in (request.key, self.seed)):
            raise ValueError(f"key={request.key} and seed={self.seed} must fit 64 bits.")
        if request.num_samples < 1 or request.max_new_tokens < 1:
            raise ValueError(f"num_samples={request.num_samples} and max_new_tokens={request.max_new_tokens} "
                             "must be at least 1.")

    def check_sampling(self, sampling):
        """Raise ValueError if stop strings can't be looked for."""
        if sampling.stop_strings and not self.decode:
            raise ValueError("Stop strings need the function that turns ids into text: give Engine "
                             "decode=tokenizer.decode.")

    def enqueue(self, requests, waiting, free):
        """Take Requests until their samples fill the free slots; their code is no part of inference mode."""
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

        A prompt is computed without its last token, which is the samples' first step; in one slot, from where
        it is copied to the others, and to the cache's last row if more samples are to come.
        """
        admitted = self.assign_slots(rows, waiting)
        self.cache.fit(max((len(pending.request.ids) for pending in admitted), default=0))
        new = [pending for pending in admitted if not pending.prefilled]
        self.prefill([(pending.slots[0], pending.request.ids[:-1]) for pending in new])
        slots = []
        for pending in admitted:
            self.copy_prompt(pending)
            slots += pending.slots
            pending.slots.clear()
        if slots:
            self.start(rows, slots)
        self.compact(rows)

    def copy_prompt(self, pending):
        """Copy a prompt's keys and values to all slots of its samples."""
        last_row = self.slots
        source = last_row if pending.prefilled else pending.slots[0]
        targets = pending.slots + [last_row] if pending.indices else pending.slots
        targets = [slot for slot in targets if slot != source]
        if targets:
            self.cache.copy(source, targets, len(pending.request.ids) - 1)
        pending.prefilled = bool(pending.indices)

    def assign_slots(self, rows, waiting):
        """Put waiting samples into free slots of rows; return the WaitingRequests that they are of."""
        admitted = []
        free = [i for i, row in enumerate(rows) if row is None]
        free += range(len(rows), self.slots)
        for slot in free:
            if not waiting:
                break
            pending = waiting[0]
            sample = Sample(pending.request, pending.indices.popleft())
            rows[slot:slot + 1] = [sample]   # in place of None, or behind the last
            if not pending.slots:
                admitted.append(pending)
            pending.slots.append(slot)
            if not pending.indices:
                waiting.popleft()
        return admitted

    def start(self, rows, slots):
        """Set the state of these slots to the beginning of their samples."""
        samples = [rows[slot] for slot in slots]
        requests = [sample.request for sample in samples]
        lengths = np.array([len(request.ids) for request in requests])
        limits = np.array([request.max_new_tokens for request in requests])
        self.prompt_tokens[slots] = lengths
        self.new_tokens[slots] = 0
        self.max_new_tokens[slots] = np.minimum(limits, self.context - lengths)

        tokens = torch.tensor([request.ids[-1] for request in requests])
        state = torch.stack((tokens, torch.from_numpy(lengths - 1)))
        self.state[:, torch.tensor(slots, device=self.device)] = state.to(self.device)

        keys = torch.tensor([request.key for request in requests])
        indices = torch.tensor([sample.index for sample in samples])
        first = int(lengths.min()) - 1
        last = min(self.context, int((lengths + limits).max()))
        noise = uniform(stream(self.seed, keys, indices)[:, None], torch.arange(first, last))
        noise = noise.to(self.noise.device)
        self.noise[torch.tensor(slots, device=noise.device), first:last] = noise

    def compact(self, rows):
        """Move the last rows up into slots that no sample waits for."""
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
        """Decode until the next poll; return ids [B, steps] and log-probabilities [B, 2, steps]."""
        B = len(rows)
        steps = min(self.poll, int((self.max_new_tokens - self.new_tokens)[:B].max()))
        self.polls += 1
        if self.cache.in_groups(B) and self.polls % SORT_EVERY == 0:
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
        """Sort rows by position, so that those of a group read about as much of the cache."""
        lengths = (self.prompt_tokens + self.new_tokens)[:len(rows)]
        order = np.argsort(-lengths, kind="stable")
        index = torch.from_numpy(order)
        self.cache.reorder(index)
        for array in self.row_arrays():
            array[:len(rows)] = array[index if isinstance(array, torch.Tensor) else order]
        rows[:] = [rows[i] for i in order]

    def step_shape(self, lengths):
        """Return (B, what the cache says of the rows) of a step of rows that read so many positions each (a
        list or array)."""
        lengths = np.asarray(lengths)        # Python's max takes 27 us longer of 512 (a Zen 5 core)
        self.cache.fit(int(lengths.max()))
        B = len(lengths)
        if self.cuda_graphs:
            B = min(self.slots, 1 << (B - 1).bit_length())
        if self.deterministic:
            B = self.slots
        return B, self.cache.groups(B, lengths)

    def collect(self, rows, ids, logprobs, sampling):
        """Record new ids [B, steps] and logprobs [B, 2, steps]; take finished Samples out of rows.

        For all rows at once: a loop over 512 of them in Python would take as long as two steps of a small
        model on a GPU.
        """
        if np.isnan(logprobs[:, 0]).any():
            self.cache.storage.zero_()       # where it would outlive its row: 0 * NaN is NaN
            raise FloatingPointError("The logits are not finite: the model's weights are broken, "
                                     "or overflow in this dtype.")
        B, steps = ids.shape
        slots = np.arange(B)[:, None]
        columns = self.new_tokens[:B, None] + np.arange(steps)
        self.ids[slots, columns] = ids
        for kind in range(1 + sampling.full_logprobs):
            self.logprobs[slots, kind, columns] = logprobs[:, kind]
        kept, stopped = self.find_stops(ids, sampling)
        self.new_tokens[:B] += kept
        self.progress.tokens += int(kept.sum())
        at_limit = (self.new_tokens == self.max_new_tokens)[:B]
        finished = []
        for i in np.flatnonzero(stopped | at_limit):
            n = self.new_tokens[i]
            sample = rows[i]
            sample.ids = self.ids[i, :n].tolist()
            sample.logprobs = self.logprobs[i, 0, :n].tolist()
            if sampling.full_logprobs:
                sample.full_logprobs = self.logprobs[i, 1, :n].tolist()
            sample.reason = "stop" if stopped[i] else "length"
            rows[i] = None
            finished.append(sample)
        return finished

    def find_stops(self, ids, sampling):
        """Return how many of its new ids [B, steps] each row keeps, and whether a stop is why."""
        B, steps = ids.shape
        remaining = (self.max_new_tokens - self.new_tokens)[:B]
        is_stop = (ids[..., None] == np.array(sampling.stop)).any(-1)            # np.isin is slower
        is_stop &= np.arange(steps) < remaining[:, None]
        stopped = is_stop.any(1)
        kept = np.where(stopped, is_stop.argmax(1) + 1, np.minimum(remaining, steps))
        if not sampling.stop_strings:
            return kept, stopped
        strings = self.find_strings(sampling.stop_strings)
        for i in np.flatnonzero(strings.may_complete(ids).any(1)):
            count = self.new_tokens[i]
            before = self.ids[i, max(0, count - strings.tail):count].tolist()
            n = strings.completed_by(ids[i, :kept[i]].tolist(), before)
            if n:
                kept[i] = n
                stopped[i] = True
        return kept, stopped

    def find_strings(self, strings):
        """Return the StopStrings of these texts, with what it found out about ids in other calls."""
        if strings not in self.stop_strings:
            self.stop_strings[strings] = StopStrings(strings, self.decode, self.config.vocab_size)
        return self.stop_strings[strings]


def requeue(rows, waiting):
    """Return the waiting queue with the samples in flight first."""
    samples = [(row.request, row.index) for row in rows if row]
    samples += [(pending.request, index) for pending in waiting for index in pending.indices]
    queue = {}
    for request, index in samples:
        pending = queue.setdefault(request, WaitingRequest(request, deque()))
        pending.indices.append(index)
    return deque(queue.values())
