"""A run in a bucket: a local folder, mirrored to gs://BUCKET/NAME.

address   what a user names: gs://BUCKET/NAME
objects   whole reads and writes of objects, tried again until an answer comes or time is over
record    the one object of a run that changes: who writes here, until when, and what is committed
tree      a folder as pieces that never change
mirror    commits a run's folder while the run goes on
"""
