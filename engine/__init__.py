"""Batched generation with a static KV cache."""
from engine.generate import Engine, Sampling
from engine.kv_cache import slots_that_fit
from engine.scheduler import Request, Sample
