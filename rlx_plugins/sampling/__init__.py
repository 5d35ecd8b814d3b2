"""Which prompts a step starts."""
