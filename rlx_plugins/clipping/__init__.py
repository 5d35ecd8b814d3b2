"""The token loss, from ratio and advantages."""
