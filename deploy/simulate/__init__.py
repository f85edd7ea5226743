"""Recorded runs under other configurations: what they would have written, and what a failure would have cost."""
