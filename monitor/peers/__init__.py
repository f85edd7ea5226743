"""Replicas of the memory tier on other nodes: a lost node takes its memory with it, but not what a peer holds of it.

    neighbours   which rank keeps whose replica
    address      where a rank can be reached from other nodes
    wire         connections: whose they are, messages and bytes, every wait bounded
    door         serving: replicas come in, pieces of payloads go out
    replicas     what this rank keeps for others
    sender       sending this rank's newest version to its keeper
    pieces       reading, at a resume, payloads that lie on other nodes
    peers        all of it, as the memory tier sees it

A replica is the share of another rank in a version, lying on this node as if that rank had been here: same names, same
record, marked as a replica. What reads versions reads it, too.
"""
