"""Gradient surgery: what the gradients of several domains undo of each other is taken out of them before
they are added up (PCGrad, Yu et al. 2020, Gradient Surgery for Multi-Task Learning).

A sample belongs to one domain, so the backward passes of K domains together cost no more arithmetic than
one over all samples; what is added are K gradients in memory and K exchanges between ranks."""
import math

import numpy as np
import torch
import torch.distributed as dist

from rollouts.batch import micro_batches
from runtime import distributed, parallel


def project(gram, orders):
    """Return coefficients, float64 [K], such that sum_i coefficients[i] * g_i is what PCGrad makes of K
    gradients: from each g_i, one after another and in an order of its own, what points against another g_j is
    projected out. gram: their inner products [K, K]; orders: for each i, in which order the others come."""
    gram = gram.double()
    K = len(gram)
    coefficients = torch.zeros(K, dtype=torch.float64)
    for i in range(K):
        mine = torch.zeros(K, dtype=torch.float64)           # what g_i has become, in terms of all
        mine[i] = 1.0
        for j in orders[i]:
            inner = mine @ gram[:, j]                        # with g_j as it was given
            if j != i and inner < 0:
                mine[j] -= inner / gram[j, j]
        coefficients += mine
    return coefficients


class PCGrad:
    """Gives an optimizer step its micro-batches domain by domain and leaves the combined gradient."""

    def __init__(self, cfg, run, stream):
        self.cfg = cfg
        self.run = run
        self.stream = stream                 # questions.QuestionStream
        self.domains = stream.domains
        self.parameters = [p for p in run.model.parameters() if p.requires_grad]
        self.place = torch.device("cpu") if cfg.surgery_buffers == "cpu" else run.hardware.device
        self.dtype = torch.bfloat16 if cfg.surgery_buffers == "bf16" else torch.float32
        self.updates = (0, 0)                # the step, and its optimizer steps so far
        self.figures = {}                    # of the last optimizer step

    def bytes(self):
        """Return what the gradients that are kept take of the device."""
        if self.place.type != self.run.hardware.device.type:
            return 0
        numbers = sum(parallel.local(p).numel() for p in self.parameters)
        return len(self.domains) * numbers * self.dtype.itemsize

    def split(self, completions):
        """Return the Completions of each domain, in the same order on every rank."""
        parts = {name: [] for name in self.domains}
        for c in completions:
            parts[self.stream.domain(c.key)].append(c)
        return list(parts.values())

    def micro_steps(self, model, completions, tokens, multiple):
        """Yield the micro-batches of each domain and, after the last, set the gradients to the combined ones.
        tokens, multiple: see batch.micro_batches."""
        kept = []
        for own in self.split(completions):
            yield from model.micro_steps(micro_batches(own, tokens, multiple) or [[]], empty=[])
            kept.append(self.take())
        self.combine(kept)

    def take(self):
        """Return the gradients that a domain has left, and clear them."""
        taken = []
        for p in self.parameters:
            gradient = torch.zeros_like(p) if p.grad is None else p.grad
            # DDP's are views of memory that the next exchange writes to.
            taken.append(parallel.local(gradient).to(self.place, self.dtype, copy=True))
            p.grad = None
        return taken

    @torch.no_grad()
    def combine(self, kept):
        """Set the gradients to the sum of what PCGrad makes of each domain's."""
        gram = self.gram(kept)
        orders = self.orders()
        # The first rank decides, or weights could drift apart.
        coefficients = distributed.on_main(lambda: project(gram, orders))
        for p, *gradients in zip(self.parameters, *kept):
            total = torch.zeros_like(parallel.local(p), dtype=torch.float32)
            for coefficient, gradient in zip(coefficients.tolist(), gradients):
                total.add_(gradient.to(total.device, torch.float32), alpha=coefficient)
            p.grad = torch.zeros_like(p)
            parallel.local(p.grad).copy_(total)
        self.figures = self.report(gram, coefficients)

    def gram(self, kept):
        """Return the inner products of the domains' gradients, float64 [K, K] on the CPU; of a sharded model
        those of all ranks' rows."""
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
            gram = gram.to(self.run.hardware.device)         # where the ranks that share exchange
            dist.all_reduce(gram, group=mesh.get_group(mesh.ndim - 1))
        return gram.cpu()

    def orders(self):
        """Return in which order each domain meets the others: a function of seed, step and optimizer step."""
        step, updates = self.updates
        self.updates = (self.run.step, updates + 1 if step == self.run.step else 0)
        generator = np.random.Generator(np.random.PCG64([self.cfg.seed, *self.updates]))
        return [generator.permutation(len(self.domains)).tolist() for _ in self.domains]

    def report(self, gram, coefficients):
        """Return the figures of an optimizer step: the share of pairs of domains whose gradients conflict, the
        cosine of each pair, and the norm of the gradient without and with surgery."""
        scale = self.run.scaler.get_scale()                  # of fp16's losses
        norms = gram.diagonal().sqrt()
        figures = {}
        conflicts = []
        for i, first in enumerate(self.domains):
            for j in range(i):
                both = (norms[i] * norms[j]).item()
                # or one of them had nothing to learn, or is not finite
                if 0 < both < math.inf:
                    cosine = gram[i, j].item() / both
                    figures[f"surgery/cosine/{self.domains[j]}/{first}"] = cosine
                    conflicts.append(cosine < 0)
        figures["surgery/conflicts"] = sum(conflicts) / max(1, len(conflicts))
        for name, weights in (("before", torch.ones_like(coefficients)), ("after", coefficients)):
            figures[f"surgery/norm_{name}"] = math.sqrt(max((weights @ gram @ weights).item(), 0.0)) / scale
        return figures
