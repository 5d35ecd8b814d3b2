"""Weights for the mismatch between the policy that sampled and the one that trains."""
