"""An HTTP endpoint for metrics, as the training process, the daemon and the supervisor each have one."""
