"""Keep the newest state of every rank in shared memory, where it survives the training process.

A version in memory is exact, of one step, and of all ranks or of none. It is no commit: it was never acknowledged, and
it is lost with the node. Bytes and records only; no torch."""
