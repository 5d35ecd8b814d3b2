"""How many rollouts a prompt gets, and when."""
