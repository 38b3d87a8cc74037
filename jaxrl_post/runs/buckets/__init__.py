"""Places in a bucket: a run that is mirrored to gs://BUCKET/NAME or s3://BUCKET/NAME, and files that are read from there.

- store: what a store of objects does in one attempt, and how that can end
- google_store, fsspec_store: gs:// by its own client, and the other schemes
- objects: the door to them: each call is tried again until an answer comes or time is over
- record: the one object of a run that changes: who writes here, until when, and what is committed
- tree: a folder as pieces that never change
- mirror: commits a run's folder while the run goes on
- followers: the part of each process of a job in that
- files: local copies of files that are read by their paths, and folders of this machine for all of this
"""
