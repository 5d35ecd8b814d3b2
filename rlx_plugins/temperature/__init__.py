"""The sampling temperature of each rollout."""
