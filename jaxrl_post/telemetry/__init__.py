"""Events, timings, metrics, logs, traces and reports of a run."""
