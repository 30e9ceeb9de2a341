"""Batched generation with a static KV cache."""
from engine.generate import Engine, Request, Sample, Sampling, slots_that_fit
