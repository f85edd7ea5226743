"""Check a machine, a disk and a store before a job uses them, and advise on problems."""
