"""Rebuilds one complete, resumable checkpoint out of the newest version of every layer."""
