"""Command line, node daemon, supervisor and launch files: all that runs beside the training process."""
