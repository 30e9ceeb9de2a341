"""Experiments behind the tables in docs/, and the GPU suite."""
