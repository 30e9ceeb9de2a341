"""Diagnosis and plots of a run folder."""
