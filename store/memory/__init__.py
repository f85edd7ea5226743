"""The memory tier: the newest state of every rank in shared memory, where it outlives the process that trained.

    tier       one folder in shared memory for each store: who may be in it, what its files are called
    arena      writing: one rank's payloads, and the records that switch between them
    held       reading: which versions lie on this node, each checked against itself
    claimed    which of them are of the history that the store tells
    version    all ranks' records of one step, put together: a commit that is nowhere on disk
    overlay    a store with such a version on top, so that everything that reads stores reads it too
    rescue     writing a version into the store, when the job that kept it is dead
    stored     one rank's share of that
    seen       where the stores are whose state lies here
    age        how long ago it was written, by a clock that nobody sets
    cleaning   removing what nobody will resume from
    room       how much memory may be taken, asked before it is

A version in memory is exact, of one step, and of all ranks or of none. It is no commit: nobody was told that it
exists, and it ends with the node. Bytes and records only; no torch.
"""
