"""The Tinker API over HTTP: clients train and sample a policy of this project from their own loops."""
