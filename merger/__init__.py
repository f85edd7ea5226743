"""Rebuilds, composes and imports complete, resumable checkpoints."""
