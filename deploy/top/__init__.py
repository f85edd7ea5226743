"""The live view of a store in a terminal.

app     the live loop, and the thread that polls the store
view    the screen
tail    reads the newest lines of a trace
"""
