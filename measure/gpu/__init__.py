"""The GPU suite that runs/gpu.sh runs."""
