"""Loss terms of their own, on their own tokens."""
