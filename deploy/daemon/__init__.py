"""Node daemon: watches the trainers of a node, commits the snapshots of dead jobs, and verifies commits.

It does not train and does not load torch. A store owned by a living job is only read."""
