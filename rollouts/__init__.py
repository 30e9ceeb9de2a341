"""The shared pipeline: questions -> requests -> samples -> graded completions -> training batches."""
