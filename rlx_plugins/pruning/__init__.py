"""Rollouts stopped, parked or dropped while they are made."""
