"""How the processes of a node find the daemon beside them, and what they say to each other. No process, no thread.

place      where its socket is, and how to connect to it
messages   what goes over it: one JSON object a line
"""
