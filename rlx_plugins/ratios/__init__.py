"""The importance ratio of the current policy over the one that sampled."""
