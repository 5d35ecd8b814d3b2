"""The divergence to a teacher, token by token, and its reweighting."""
