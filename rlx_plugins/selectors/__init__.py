"""Which tokens carry the update."""
