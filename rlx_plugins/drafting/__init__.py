"""Speculative drafts, in the process of the inference engine."""
