"""Recipes: one YAML file names a paper's plug-ins, a host and the host's own arguments; `rlx run` trains it."""
