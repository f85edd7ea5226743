"""The live view of a store in a terminal.

tail    the newest lines of a trace, read as they come
watch   how things stand, looked at again and again at little cost
rows    the layers of a frame
frame   one frame as lines of text
keys    what is typed
live    the loop
"""
