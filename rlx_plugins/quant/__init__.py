"""The numbers of a quantised rollout engine in the training forward."""
