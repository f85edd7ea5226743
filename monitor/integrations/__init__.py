"""Integrate with trainers of others. A package of theirs is imported only in the file that has its name."""
