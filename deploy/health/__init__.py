"""Judge from files alone whether a run is safe: from its store, drift trace, shared memory and disk."""
