"""The store: the on-disk contract between whoever writes checkpoints and whoever reads them.

Bytes and numpy only. This package knows nothing of torch, of a training framework or of a policy."""
