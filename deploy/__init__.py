"""Everything beside the training process: the command line and the launch files."""
