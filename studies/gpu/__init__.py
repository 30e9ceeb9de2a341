"""Everything that bash runs/gpu.sh verifies and measures on a card."""
