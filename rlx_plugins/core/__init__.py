"""The frame: kinds, registry, batch, group statistics, the rollout program, the batch phase, the objective."""
