"""Rewards shaped over a group or a batch."""
