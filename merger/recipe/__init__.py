"""Reads recipes and composes one checkpoint from several sources."""
