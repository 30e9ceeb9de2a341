"""What torch.compile finds in train.py's and grpo.py's steps: whole parts, and few of them whatever the lengths."""
import random

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd

import forked
from conftest import ROOT, count_graphs, environment
from model import GPT, GPTConfig
from rollouts import batch as batching
from rollouts.pipeline import Completion
from runtime import distributed, hardware

LLAMA = dict(n_kv_head=1, mlp="swiglu", qk_norm=False)
GPT2 = dict(position="learned", norm="layernorm", tied_head=True, dropout=0.1, logit_softcap=5.0)


def model_of(shape, checkpointing=False):
    torch.manual_seed(0)
    return GPT(GPTConfig(**dict(vocab_size=300, block_size=512, n_layer=5, n_head=2, n_embd=32) | shape),
               gradient_checkpointing=checkpointing)


def of_examples(fast, rng):
    x = torch.randint(300, (rng.randrange(1, 9), 64 * rng.randrange(1, 5)))
    index = torch.arange(0, x.numel(), 3)
    fast.train().loss(x, x, index).backward()
    with torch.no_grad():
        fast.eval().loss(x, x, index)


def of_completions(fast, rng):
    """A micro-batch of grpo.py's: shared prompts of any length (none, with one of a single token), rows of any length."""
    prompts = [[5] * rng.randrange(1, 100) for _ in range(rng.randrange(1, 4))]
    completions = [Completion(rng.choice(prompts), [3] * rng.randrange(1, 200), [], True) for _ in range(rng.randrange(1, 12))]
    for c in completions:
        c.logprobs = [-1.0] * len(c.ids)
    batch = batching.padded(completions, hardware.Hardware.length_multiple.fget(fast.hardware))
    arguments = batch.x, batch.y, 1.0, batch.prefixes, batch.target_index
    fast.train().token_logprobs(*arguments)[0].sum().backward()
    with torch.no_grad():
        fast.token_logprobs(*arguments)


@pytest.mark.parametrize("micro_step, shape, checkpointing", [
    (of_examples, GPT2, True), (of_completions, LLAMA, False)])
def test_few_graphs_serve_all_lengths_and_none_is_broken(monkeypatch, micro_step, shape, checkpointing):
    """One block for all of them, and a loss: with a gradient and without, and again for what is 1 or not of many sizes."""
    graphs = count_graphs(monkeypatch)
    fast = distributed.TrainedModel(model_of(shape, checkpointing), compile=True, dynamic=True)
    fast.hardware = hardware.setup("cpu", compile=True)
    rng = random.Random(1)
    for _ in range(6):
        micro_step(fast, rng)
    assert 4 <= len(graphs) <= 10            # of five layers
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize("micro_step", [of_examples, of_completions])
def test_parts_that_are_compiled_compute_the_same(monkeypatch, micro_step):
    """What Dynamo captured is run in place of what was written; it takes the fused loss."""
    count_graphs(monkeypatch)
    gradients = []
    for compile in (False, True):
        fast = distributed.TrainedModel(model_of({}, False), compile=compile, dynamic=True)
        fast.hardware = hardware.setup("cpu", compile=True)
        for p in fast.model.parameters():
            torch.nn.init.normal_(p, std=0.1, generator=torch.Generator().manual_seed(p.numel()))
        torch.manual_seed(1)
        micro_step(fast, random.Random(2))
        gradients.append([p.grad for p in fast.model.parameters()])
    for ours, theirs in zip(*gradients):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


class Graphs:
    """Stands in for CUDA graphs: the n-th call of a step writes its outputs where the n-th of the last step has written its own."""

    def __init__(self):
        self.places = {}
        self.calls = self.steps = 0

    def begin(self):
        self.steps += 1
        self.calls = 0

    def compiled(self, graph, inputs):
        def replay(arguments):
            outputs = graph(*arguments)
            arguments.clear()
            self.calls += 1
            return [self.kept(n, output) if isinstance(output, torch.Tensor) else output for n, output in enumerate(outputs)]
        replay._boxed_call = True
        return replay

    def kept(self, n, output):
        place = self.places.setdefault((self.calls, n, output.shape, output.dtype), torch.empty_like(output))
        return place.copy_(output).detach()


@pytest.mark.parametrize("micro_step, dynamic", [(of_examples, False), (of_completions, True)])
def test_cuda_graphs_accumulate_the_gradients_of_micro_steps(monkeypatch, micro_step, dynamic):
    """A gradient that is a graph's output would be overwritten by the next micro-step."""
    compile, graphs = torch.compile, Graphs()
    backend = aot_autograd(fw_compiler=graphs.compiled, bw_compiler=graphs.compiled)
    monkeypatch.setattr(torch, "compile", lambda f, mode, dynamic: compile(f, backend=backend, dynamic=dynamic))
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", graphs.begin)
    torch._dynamo.reset()
    gradients = []
    for mode in (None, "reduce-overhead"):
        fast = distributed.TrainedModel(model_of({"n_layer": 1}), compile=bool(mode), mode=mode, dynamic=dynamic)
        fast.hardware = hardware.setup("cpu", compile=True)
        for p in fast.model.parameters():
            torch.nn.init.normal_(p, std=0.1, generator=torch.Generator().manual_seed(p.numel()))
        torch.manual_seed(1)
        for seed in fast.micro_steps([2, 2]):
            micro_step(fast, random.Random(seed))
        gradients.append([p.grad for p in fast.model.parameters()])
    assert graphs.steps == 4                 # each with an evaluation
    for ours, theirs in zip(*gradients):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_lengths_are_rounded_up_where_code_is_compiled():
    hw = hardware.setup("cpu", compile=True)
    completions = [Completion([5] * 70, [3] * n, [-1.0] * n, True) for n in (1, 60, 65)]
    batch = batching.padded(completions, hw.length_multiple)
    assert (batch.x.shape, batch.prefixes.ids.shape) == ((3, 128), (1, 128))
    assert batch.target_index.tolist() == [0, *range(128, 188), *range(256, 321)]
    assert len(batch.prefixes.kept) == 256 and set(range(69)) < set(batch.prefixes.kept.tolist())       # 69 + 126
    # and attention's part of a batch's cost is that of the rounded lengths
    assert batching.cost_of(completions, 64) == batching.token_cost(69 + 126, 1, 128, 3, 128)
    parts = batching.micro_batches(completions, 330, hw.length_multiple)
    assert [len(part) for part in parts] == [2, 1] and all(batching.cost_of(part, 64) <= 330 for part in parts)
    assert hardware.setup("cpu").length_multiple == 1


def test_ranks_exchange_the_gradients_of_a_block_while_the_next_is_computed():
    """Of a step that is compiled in one piece all gradients come at its end; and DDP would have blocks cut at its buckets."""
    program = """
import torch
from model import GPT, GPTConfig
from runtime import distributed
distributed.init()
graphs = []
def backend(graph, inputs):
    graphs.append(graph)
    return graph.forward
compile = torch.compile
torch.compile = lambda f, mode=None, dynamic=None: compile(f, backend=backend, dynamic=dynamic)
events = []
sum_gradients = distributed.sum_gradients
def exchanged(state, bucket):
    events.append("exchange")
    return sum_gradients(state, bucket)
distributed.sum_gradients = exchanged
torch.manual_seed(0)
gradients = []
for compiled in (False, True):
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=100, block_size=16, n_layer=4, n_head=2, n_embd=512))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.05)
    fast = distributed.TrainedModel(model, compile=compiled, dynamic=False)
    fast.share_gradients()
    x = torch.randint(100, (2, 16), generator=torch.Generator().manual_seed(distributed.rank()))
    model.token_embedding.weight.register_hook(lambda gradient: events.append("embedding"))
    for _ in range(2):                       # in the first backward pass DDP finds out in which order gradients come
        events.clear()
        model.zero_grad()
        for _ in fast.micro_steps([x]):
            fast.loss(x, x).backward()
    gradients.append([p.grad.clone() for p in model.parameters()])
for ours, theirs in zip(*gradients):
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
if distributed.is_main():
    print(len(graphs), events)
distributed.close()
"""
    done = forked.run([*forked.TORCHRUN, "--nproc_per_node=2", "-c", program], env=environment(), cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.startswith("2 ['exchange', "), done.stdout + done.stderr
