"""One self-contained HTML page about a store and its run, for people.

bins       a run of any length in a bounded number of columns
history    what the drift trace tells, read once, line by line
incidents  what went wrong, and when
scale      colours for drift
heat       heat maps as small SVG
bars       bytes and stall beside those of full saves
page       all of it as HTML
"""
