"""Places in a bucket: a run that is mirrored to gs://BUCKET/NAME, and files that are read from there.

- address: what a user names, gs://BUCKET/NAME
- objects: whole reads and writes of objects, tried again until an answer comes or time is over
- record: the one object of a run that changes: who writes here, until when, and what is committed
- tree: a folder as pieces that never change
- mirror: commits a run's folder while the run goes on
- files: local copies of files that are read by their paths
- scratch: folders of this machine for all of this
"""
