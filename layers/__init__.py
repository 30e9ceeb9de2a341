"""The parts of model.py: kernels with a backward pass of their own, linear attention, adapters."""
