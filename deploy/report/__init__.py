"""Write one self-contained HTML page about a store and its run."""
