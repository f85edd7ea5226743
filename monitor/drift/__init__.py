"""Drift meters: ``exact`` keeps a copy, ``sketch`` keeps a few kilobytes a unit."""
