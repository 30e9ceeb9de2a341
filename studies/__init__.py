"""Experiments behind the tables of docs/, and the GPU suite."""
