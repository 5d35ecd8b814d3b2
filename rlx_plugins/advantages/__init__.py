"""How much credit each token of a rollout gets."""
