"""Rows and tokens of earlier steps, used again."""
