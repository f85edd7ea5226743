"""Live terminal view of a run's safety and the drift of its layers."""
