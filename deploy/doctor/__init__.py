"""Looks at a machine, a disk and a store before a job does, and says what to do."""
