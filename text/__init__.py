"""Texts, tokenizers, prompts, examples of fine-tuning, perplexity."""
