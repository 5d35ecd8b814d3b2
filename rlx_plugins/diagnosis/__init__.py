"""Pathologies of a run, read from its metrics: which, how bad, on what evidence, and the kinds of method for each.

The stages are those of the survey "Generate, Filter, Control, Replay" (arXiv 2605.02913); rules and thresholds are
reconstructed.
"""
