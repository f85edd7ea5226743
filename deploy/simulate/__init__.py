"""Replay a recorded or assumed run under other configurations."""
