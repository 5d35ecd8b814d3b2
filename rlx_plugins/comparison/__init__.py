"""Matched-seed comparison of recipes: runs them under one protocol and reports paired differences.

The protocol is that of DataFlex-RL (arXiv 2609.06107); Holm's correction and the planning of seeds are added.
"""
