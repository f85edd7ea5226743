"""Replicas of in-memory versions on other nodes, from which a lost node's ranks resume.

    neighbours       which rank keeps whose replica
    transport        authenticated HTTP between ranks
    replica_client   sends this rank's versions, reads payloads from other nodes
    replica_server   receives the replicas kept for others, serves payloads
    peers            the interface to the memory tier

A replica is another rank's share of a version, stored on this node as if that rank were here: same names, same record,
marked as a replica. Code that reads versions reads replicas too.
"""
