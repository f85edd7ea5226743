"""The daemon of a node: beside the trainers, it writes out of memory what they can write no more.

    hold       one daemon for each base: the lock and the socket
    server     the process: connections, signals, the clock
    node       what happens, and what is done about it
    peers      who is at the other end of a connection
    jobs       the jobs of this node, and what a death means: a table, no I/O
    rescuer    threads that write what dead jobs left, one for each store
    verifier   one thread that reads commits again, slowly
    metrics    what is served to Prometheus

It trains nothing and loads no torch. It never touches a store that a living job owns, but to read it.
"""
