"""PCGrad: project out the conflicting components of the domains' gradients before they are summed (Yu et al.
2020, Gradient Surgery for Multi-Task Learning).

Each sample belongs to one domain, so the backward passes of K domains cost as much as one over all samples.
The overhead is K gradients in memory and K reductions over the ranks."""
import math

import numpy as np
import torch
import torch.distributed as dist

from rollouts.batch import micro_batches
from runtime import distributed, parallel


def project(gram, orders):
    """Return the coefficients c, float64 [K], of PCGrad's gradient sum_i c[i] * g_i. From each g_i it
    removes, for every other g_j in the order orders[i], the projection on g_j if their inner product is
    negative. gram: inner products of the gradients [K, K]. orders: for each i a permutation of range(K)."""
    gram = gram.double()
    K = len(gram)
    coefficients = torch.zeros(K, dtype=torch.float64)
    for i in range(K):
        projected = torch.zeros(K, dtype=torch.float64)      # the projected g_i, as coefficients of all g
        projected[i] = 1.0
        for j in orders[i]:
            inner = projected @ gram[:, j]                   # with the original g_j
            if j != i and inner < 0:
                projected[j] -= inner / gram[j, j]
        coefficients += projected
    return coefficients


class PCGrad:
    """Yields the micro-batches of an optimizer step by domain and sets the gradients to PCGrad's."""

    def __init__(self, cfg, run, stream):
        self.cfg = cfg
        self.run = run
        self.stream = stream                 # questions.QuestionStream
        self.domains = stream.domains
        self.parameters = [p for p in run.model.parameters() if p.requires_grad]
        self.place = torch.device("cpu") if cfg.surgery_buffers == "cpu" else run.hardware.device
        self.dtype = torch.bfloat16 if cfg.surgery_buffers == "bf16" else torch.float32
        self.updates = (0, 0)                # (step, optimizer steps in it so far)
        self.figures = {}                    # metrics of the last optimizer step

    def bytes(self):
        """Return the device memory of the kept gradients."""
        if self.place.type != self.run.hardware.device.type:
            return 0
        numbers = sum(parallel.local(p).numel() for p in self.parameters)
        return len(self.domains) * numbers * self.dtype.itemsize

    def split(self, completions):
        """Return a list of Completions per domain, in the same order on every rank."""
        parts = {name: [] for name in self.domains}
        for c in completions:
            parts[self.stream.domain(c.key)].append(c)
        return list(parts.values())

    def micro_steps(self, model, completions, tokens, multiple):
        """Yield the micro-batches of each domain, then combine the domains' gradients. tokens, multiple: see
        batch.micro_batches."""
        kept = []
        for own in self.split(completions):
            yield from model.micro_steps(micro_batches(own, tokens, multiple), empty=[])
            kept.append(self.take())
        self.combine(kept)

    def take(self):
        """Return copies of a domain's gradients and clear them."""
        taken = []
        for p in self.parameters:
            gradient = torch.zeros_like(p) if p.grad is None else p.grad
            # A copy, since DDP's gradients are views of buffers that the next reduction overwrites.
            taken.append(parallel.local(gradient).to(self.place, self.dtype, copy=True))
            p.grad = None
        return taken

    @torch.no_grad()
    def combine(self, kept):
        """Set the parameters' gradients to PCGrad's combination of the domains' gradients."""
        gram = self.gram(kept)
        orders = self.orders()
        # Computed on the first rank only: rounding on another could let weights drift apart.
        coefficients = distributed.on_main(lambda: project(gram, orders))
        for p, *gradients in zip(self.parameters, *kept):
            total = torch.zeros_like(parallel.local(p), dtype=torch.float32)
            for coefficient, gradient in zip(coefficients.tolist(), gradients):
                total.add_(gradient.to(total.device, torch.float32), alpha=coefficient)
            p.grad = torch.zeros_like(p)
            parallel.local(p.grad).copy_(total)
        self.figures = self.report(gram, coefficients)

    def gram(self, kept):
        """Return the inner products of the domains' gradients, float64 [K, K] on the CPU, over all ranks if
        the model is sharded."""
        K = len(kept)
        gram = torch.zeros(K, K, dtype=torch.float64)
        for i in range(K):
            for j in range(i, K):
                products = [torch.dot(a.flatten().float(), b.flatten().float())
                            for a, b in zip(kept[i], kept[j])]
                # An Apple GPU has no float64.
                gram[i, j] = gram[j, i] = torch.stack(products).cpu().double().sum()
        if parallel.is_sharded(self.parameters[0]):
            mesh = self.parameters[0].device_mesh
            gram = gram.to(self.run.hardware.device)         # where the mesh's group communicates
            dist.all_reduce(gram, group=mesh.get_group(mesh.ndim - 1))
        return gram.cpu()

    def orders(self):
        """Return a random order of the domains for each domain, from seed, step and optimizer step."""
        step, updates = self.updates
        self.updates = (self.run.step, updates + 1 if step == self.run.step else 0)
        generator = np.random.Generator(np.random.PCG64([self.cfg.seed, *self.updates]))
        return [generator.permutation(len(self.domains)).tolist() for _ in self.domains]

    def report(self, gram, coefficients):
        """Return the metrics of an optimizer step: fraction of domain pairs with conflicting gradients,
        cosine of each pair, and gradient norm before and after PCGrad."""
        scale = self.run.scaler.get_scale()                  # fp16's loss scale
        norms = gram.diagonal().sqrt()
        figures = {}
        conflicts = []
        for i, first in enumerate(self.domains):
            for j in range(i):
                both = (norms[i] * norms[j]).item()
                # else a gradient is zero or not finite
                if 0 < both < math.inf:
                    cosine = gram[i, j].item() / both
                    figures[f"surgery/cosine/{self.domains[j]}/{first}"] = cosine
                    conflicts.append(cosine < 0)
        figures["surgery/conflicts"] = sum(conflicts) / max(1, len(conflicts))
        for name, weights in (("before", torch.ones_like(coefficients)), ("after", coefficients)):
            figures[f"surgery/norm_{name}"] = math.sqrt(max((weights @ gram @ weights).item(), 0.0)) / scale
        return figures
