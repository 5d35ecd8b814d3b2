"""Papers that are several parts: one name that stands for plug-ins of several kinds."""
