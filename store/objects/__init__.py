"""Stores in an object store: ``store.files.Files`` by whole objects, put once each.

options   what a bucket is reached with
bucket    requests to one bucket: retried, bounded in time, their errors in our words; the one user of obstore
newfile   a file while it is written: in memory, streamed, or spooled
reader    ranges read ahead
files     the operations of a store's files, by requests
"""
