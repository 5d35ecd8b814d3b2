"""Hosts: what trains with the plug-ins. Nothing outside this package imports a trainer or an inference engine."""
